"""A folder with `config.json` and safetensors files, as the Hugging Face Hub lays it out. Never a pickle."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxinfer.loaders.checkpoint import Index

INDEX_NAME = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
      ValueError: the file is not one.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object")
    return content


class SafetensorsFolder:
    """See `Checkpoint`.

    Raises:
      ValueError: no config, no weights, only pickles, a missing or truncated shard, an index that points outside.
    """

    tokenizer_data = None

    def __init__(self, folder: Path, *, with_weights: bool = True) -> None:
        self.path = str(folder)
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} has no config.json")
        self.config = read_json(folder / "config.json")
        generation = folder / "generation_config.json"
        self.generation_config = read_json(generation) if generation.is_file() else {}
        self._files: dict[str, Any] = {}
        if with_weights:
            for path in _shards(folder):
                self._open(path)
            _check_index(folder, self._files)

    def _open(self, path: Path) -> None:
        if not path.is_file():
            raise ValueError(f"{path} is missing, though {INDEX_NAME} names it")
        try:
            file = safe_open(path, framework="np")
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{path} is truncated or not a safetensors file: {error}") from None
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if name in self._files:
                raise ValueError(f"{path}: tensor {name} is in two files")
            self._files[name] = file

    def tensor_names(self) -> Iterable[str]:
        return self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def read(self, name: str, index: Index) -> np.ndarray:
        part = self._files[name].get_slice(name)
        return part[index] if index else part[:]


def is_complete(folder: Path) -> bool:
    """Whether configuration and every weight file are there (a cache may hold a part, such as a tokenizer)."""
    try:
        return (folder / "config.json").is_file() and all(path.is_file() for path in _shards(folder))
    except ValueError:
        return False


def _shards(folder: Path) -> list[Path]:
    index = folder / INDEX_NAME
    if index.is_file():
        return [folder / name for name in sorted(set(_weight_map(index).values()))]
    found = sorted(folder.glob("*.safetensors"))
    if found:
        return found
    pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
    if pickles:
        raise ValueError(f"{folder} has no safetensors; {pickles[0]} may be a pickle, which is never loaded")
    raise ValueError(f"{folder} has no *.safetensors files")


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index} has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or name != Path(name).name or name in ("", ".", ".."):
            raise ValueError(f"{index} names the file {name!r}, which is not in its folder")
        if not name.endswith(".safetensors"):
            raise ValueError(f"{index} names {name!r}, which is not a safetensors file")
    return weight_map


def _check_index(folder: Path, files: dict[str, Any]) -> None:
    index = folder / INDEX_NAME
    if index.is_file():
        absent = sorted(set(_weight_map(index)) - set(files))
        if absent:
            raise ValueError(f"{index} lists tensor {absent[0]}, which no file holds")
