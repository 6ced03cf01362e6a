"""Compiled programs in a folder, found again without tracing or lowering.

JAX's own compilation cache is asked with the lowered program, and lowering takes Python seconds for a step with Mosaic
kernels (one for a mixed step), one program after the other. Here the key is what the programs are made from: the
package's source, versions, device, flags, model and sizes.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

LOGGER = logging.getLogger("jaxinfer")
MOST_BYTES = 8 << 30
"""Of a folder; the oldest files go first."""


class ExecutableCache:
    """Programs of one engine configuration.

    The folder must be as trustworthy as the program itself: what is loaded from it is run.

    Args:
      folder: made when something is stored.
      ingredients: all that the programs depend on beside their names; their `repr`s are hashed.
      devices: where programs run.
    """

    def __init__(self, folder: Path, ingredients: Iterable[Any], *devices: Any) -> None:
        self.folder = folder
        self.num_loaded = 0
        self._devices = devices
        device = devices[0]
        ids = [each.id for each in devices]  # a stored program runs where it was compiled for
        facts = (ids, jax.__version__, version("jaxlib"), device.client.platform_version, device.device_kind)
        self._digest = hashlib.sha256(repr((facts, source_digest(), *ingredients)).encode()).hexdigest()

    def load(self, name: str, arguments: Any, results: Any) -> jax.stages.Compiled | None:
        """A stored program, or None.

        Args:
          name: of the program.
          arguments: tuple of pytrees of the shape of its arguments.
          results: pytree of the shape of its results.
        """
        path = self._path(name)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        trees = jax.tree.structure((arguments, {})), jax.tree.structure(results)
        try:
            program = serialize_executable.deserialize_and_load(data, *trees, execution_devices=self._devices)
        except Exception as error:  # whatever is wrong with the file, compiling makes a new one
            LOGGER.info("cannot load the compiled program %s: %s", path, error)
            return None
        self.num_loaded += 1
        return program

    def store(self, name: str, compiled: jax.stages.Compiled, results: Any) -> None:
        """Keeps a program; where that fails it is compiled again the next time."""
        try:
            data, _, out_tree = serialize_executable.serialize(compiled)
            assert out_tree == jax.tree.structure(results), f"{name} returns {out_tree}"
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
                file.write(data)
            os.replace(file.name, self._path(name))
            self._prune()
        except (OSError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as error:
            LOGGER.info("cannot keep the compiled program %s: %s", name, error)

    def _path(self, name: str) -> Path:
        return self.folder / hashlib.sha256(f"{self._digest} {name}".encode()).hexdigest()

    def _prune(self) -> None:
        files: list[tuple[float, int, Path]] = []
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another thread's or process' file has its name by now
                facts = path.stat()
                files.append((facts.st_mtime, facts.st_size, path))
        files.sort()
        excess = sum(size for _, size, _ in files) - MOST_BYTES
        for _, size, path in files:
            if excess <= 0:
                break
            path.unlink(missing_ok=True)
            excess -= size


def source_digest() -> str:
    """A hash of the package's code and tuned parameters."""
    root = Path(__file__).parents[1]
    files = [Path(folder, name) for folder, _, names in os.walk(root, followlinks=True) for name in names]
    digest = hashlib.sha256()
    for path in sorted(path for path in files if path.suffix in (".py", ".json")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
