"""A wheel, installed alone in an empty environment, runs outside the repository."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tiny_models import write_model

ROOT = Path(__file__).parents[2]


def call(*command: object, cwd: Path) -> str:
    return subprocess.run([*map(str, command)], check=True, cwd=cwd, capture_output=True, text=True).stdout


@pytest.mark.slow
def test_wheel_runs_anywhere(tmp_path):
    call(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT, cwd=tmp_path)
    wheel = next(tmp_path.glob("jaxinfer-*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    assert "jaxinfer/kernels/paged_attention/api.py" in names
    assert "jaxinfer/sharding/rules.py" in names
    assert not [name for name in names if name.startswith(("kernels/", "sharding/", "tests/"))]
    call(sys.executable, "-m", "venv", tmp_path / "empty", cwd=tmp_path)
    python = tmp_path / "empty" / "bin" / "python"
    call(python, "-m", "pip", "install", "--quiet", wheel, cwd=tmp_path)
    model = write_model(tmp_path / "model")
    out = call(
        python, "-m", "jaxinfer.generate", "--model", model, "--prompt", "hi", "--json", "--max-tokens", 3, cwd=tmp_path
    )
    assert len(json.loads(out)["token_ids"]) == 3
