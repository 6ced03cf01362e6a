"""The set-up script finds a Python that is new enough, or says what it found."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "find_python.sh"


def fake(folder: Path, name: str, *, works: bool) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nexit {0 if works else 127}\n")
    path.chmod(0o755)
    return path


def find(folder: Path, home: Path) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(home)}
    # The system's own Python must not be found: the script sees only names that the test made.
    text = SCRIPT.read_text()
    names = [name for name in ("python3.14", "python3.13", "python3.12", "python3") if not (folder / name).exists()]
    for name in names:
        fake(folder, name, works=False)
    return subprocess.run(["/bin/sh", "-c", text], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", ["python3.14", "python3.13", "python3.12", "python3"])
def test_a_name_on_the_path(tmp_path, name):
    fake(tmp_path / "bin", name, works=True)
    assert find(tmp_path / "bin", tmp_path).stdout.strip() == str(tmp_path / "bin" / name)


def test_a_version_that_pyenv_has_though_its_shim_does_not_run(tmp_path):
    fake(tmp_path / "bin", "python3.12", works=False)
    wanted = fake(tmp_path / ".pyenv/versions/3.13.0/bin", "python", works=True)
    assert find(tmp_path / "bin", tmp_path).stdout.strip() == str(wanted)


def test_nothing_suitable(tmp_path):
    result = find(tmp_path / "bin", tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith("jaxinfer needs Python 3.12 or newer")
    assert len(result.stderr.strip().splitlines()) == 1


def test_make_says_the_same(tmp_path):
    """The Makefile calls the script and stops with its line."""
    folder = tmp_path / "bin"
    for name in ("python3.14", "python3.13", "python3.12", "python3"):
        fake(folder, name, works=False)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HOME": str(tmp_path)}
    result = subprocess.run(
        ["make", "generate", f"VENV={tmp_path / 'venv'}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert "jaxinfer needs Python 3.12 or newer" in result.stderr
    assert not os.path.exists(tmp_path / "venv")
