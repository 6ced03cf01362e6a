"""Scripts in vLLM's names run with only their import changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import write_model

SCRIPTS = sorted((Path(__file__).parents[1] / "vllm_scripts").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_script_runs(tmp_path, tmp_path_factory, script):
    folder = write_model(tmp_path / "m", num_hidden_layers=1)
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path_factory.getbasetemp() / "cache")}
    result = subprocess.run(
        [sys.executable, script, folder], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("\n") >= 2


def test_there_are_three():
    assert len(SCRIPTS) == 3
