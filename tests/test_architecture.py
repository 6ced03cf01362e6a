"""The house's rules: imports run one way, host code needs no jax, no folder hides another package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = [
    {"generate", "bench", "measure", "interactive", "arguments"},
    {"llm"},
    {"engine"},
    {"models", "scheduler"},
    {"loaders", "layers", "cache", "sampling"},
    {"kernels", "sharding", "metrics", "core", "config", "batch", "tokenizer"},
]
"""From the roof down; a module imports from its own floor or below."""
LEVEL = {room: level for level, rooms in enumerate(FLOORS) for room in rooms}
NO_JAX = ("core", "config", "tokenizer", "scheduler", "cache", "metrics")


def source_files() -> list[Path]:
    return [path for folder in ("jaxinfer", "kernels", "sharding") for path in sorted((ROOT / folder).rglob("*.py"))]


def room_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[0] if parts[0] in ("kernels", "sharding") else parts[1]


def imported(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_down_the_floors(path):
    room = room_of(path)
    for name in imported(path):
        parts = name.split(".")
        assert parts[0] not in ("kernels", "sharding"), f"{path}: import jaxinfer.{parts[0]}"
        if parts[0] != "jaxinfer" or len(parts) == 1 or room == "__init__":
            continue
        target = parts[1]
        assert target in LEVEL, f"{path}: {target} has no floor"
        assert LEVEL[room] <= LEVEL[target], f"{path}: {room} imports {target}, which is above it"
        if room in ("kernels", "sharding"):
            assert target in ("kernels", "sharding"), f"{path}: kernels and sharding import only jax and each other"


def test_every_room_has_a_floor():
    assert {room_of(path) for path in source_files()} - {"__init__"} <= set(LEVEL)


def test_host_code_runs_without_jax():
    """Really without: the import of jax is made to fail."""
    program = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("jax", "jaxlib", "flax"):
            raise ImportError(name)
sys.meta_path.insert(0, Refuse())
import importlib, pkgutil
for room in {NO_JAX!r}:
    module = importlib.import_module("jaxinfer." + room)
    for part in pkgutil.iter_modules(getattr(module, "__path__", [])):
        importlib.import_module(f"jaxinfer.{{room}}.{{part.name}}")
from jaxinfer import SamplingParams, EngineConfig
from jaxinfer.cache import KVCacheManager
from jaxinfer.core import Request
from jaxinfer.scheduler import Scheduler, SchedulerLimits
limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=32)
scheduler = Scheduler(limits, KVCacheManager(9, 4))
scheduler.add(Request("r", [1, 2, 3], SamplingParams(), 4))
assert scheduler.schedule().num_tokens == 3
assert not any(name.split(".")[0] in ("jax", "jaxlib", "flax") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_import_is_lazy():
    """`import jaxinfer` brings neither jax nor transformers."""
    program = "import jaxinfer, sys; sys.exit('jax' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_folders_at_the_top_are_no_packages():
    """A top-level package named `kernels` would hide the one that transformers looks for."""
    for name in ("kernels", "sharding"):
        assert not (ROOT / name / "__init__.py").exists()
        assert (ROOT / "jaxinfer" / name).is_symlink()
    assert not list((ROOT / "tests").rglob("__init__.py"))


def test_files_are_short():
    for path in source_files():
        limit = 600 if room_of(path) == "kernels" else 400
        assert len(path.read_text(encoding="utf-8").splitlines()) <= limit, f"{path} is two things"


def test_no_environment_is_read_while_running():
    """Behaviour comes from arguments: only the cache folder and XLA's flags are looked up."""
    readers = [path for path in source_files() if re.search(r"os.environ(?!.setdefault)|getenv", path.read_text())]
    assert [path.relative_to(ROOT).as_posix() for path in readers] == [
        "jaxinfer/arguments.py",
        "jaxinfer/engine/build.py",
    ]
