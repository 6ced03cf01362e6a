"""Settings of every test: strict promotion, no network, eight fake devices, a compile cache of the run's own."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["HF_HUB_OFFLINE"] = "1"
# XLA's pool has a thread a core. The GPU interpreter's kernels block in it: on two cores they can wait for ever.
os.environ.setdefault("NPROC", "8")
os.environ["TRANSFORMERS_VERBOSITY"] = "error"

import tempfile

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

gc.set_threshold(200_000, 20, 50)  # tracing makes many objects that stay: looking through them was a tenth of all time
jax.config.update("jax_num_cpu_devices", 8)  # for meshes; all else runs on the first
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Many tests build the same small engines: within one run, each program is compiled once, by the first test that needs
# it or by a process that it starts. Each worker has a folder of its own: jax reads what another is still writing, and
# with its lock, waits ten seconds and fails.
_CACHE = tempfile.TemporaryDirectory(prefix="jaxinfer-tests-")
jax.config.update("jax_compilation_cache_dir", _CACHE.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
os.environ["JAX_COMPILATION_CACHE_DIR"] = _CACHE.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


@pytest.fixture(autouse=True, scope="module")
def _free_programs():
    """Each compiled program maps memory, and a process may have 65,530 maps: beyond that XLA crashes."""
    yield
    _free()


@pytest.fixture(autouse=True)
def _free_programs_of_a_slow_test(request: pytest.FixtureRequest):
    """Some of them have several engines on meshes, with a program a device."""
    yield
    if request.node.get_closest_marker("slow") is not None:
        _free()


def _free() -> None:
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def _compile_anew(request: pytest.FixtureRequest):
    """A program for a device that is not there can be stored, but not loaded: it is compiled each time."""
    if request.node.get_closest_marker("aot") is None:
        yield
        return
    compilation_cache.reset_cache()  # which remembers whether it is in use
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()


@pytest.fixture(scope="session")
def golden_folder():
    """Where the goldens are."""
    from pathlib import Path

    return Path(__file__).parent / "goldens"
