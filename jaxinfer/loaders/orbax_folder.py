"""A converted checkpoint: parameters as the model has them, written and read by Orbax straight to their shards.

      folder/config.json, generation_config.json, tokenizer.json, tokenizer_config.json     as in a safetensors folder
      folder/orbax/                                                                         flat: path -> parameter

`scripts/convert_checkpoint.py` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from jaxinfer.loaders.checkpoint import Checkpoint
from jaxinfer.loaders.safetensors_folder import SafetensorsFolder

SUBFOLDER = "orbax"


def is_orbax(folder: Path) -> bool:
    return (folder / SUBFOLDER).is_dir()


class OrbaxFolder(SafetensorsFolder):
    """See `Checkpoint` for the configuration; weights come through `restore`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, with_weights=False)
        self._weights = folder.absolute() / SUBFOLDER

    def restore(
        self,
        leaves: Sequence[tuple[tuple[str | int, ...], jax.ShapeDtypeStruct]],
        shardings: Sequence[Sharding],
        widen: Mapping[tuple[str | int, ...], Callable[[Any], Any]],
        others: Iterable[tuple[str | int, ...]] = (),
    ) -> list[jax.Array]:
        """Parameters in the order of `leaves`, in their dtypes, on their shardings.

        Args:
          leaves: (path, abstract array), as on one device, which is how they are stored.
          shardings: where each lies; a device reads its part only.
          widen: what makes the array that a mesh has of a stored one, for the paths that differ there. Those are read
            whole, by the host.
          others: paths of what else the checkpoint may have: the model's other stages. They are not read.

        Raises:
          ValueError: the checkpoint is damaged, or of another model.
        """
        import orbax.checkpoint as ocp  # here: it takes a second, and other formats do not need it

        target = {
            path_name(path): np.empty(leaf.shape, leaf.dtype)  # which asks for an array of the host
            if path in widen
            else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
            for (path, leaf), sharding in zip(leaves, shardings, strict=True)
        }
        ways = ocp.checkpoint_utils.construct_restore_args(target)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            try:
                self._check(checkpointer.metadata(self._weights), target, set(map(path_name, others)))
                wanted = ocp.args.PyTreeRestore(target, restore_args=ways, partial_restore=True)
                restored = checkpointer.restore(self._weights, wanted)
            except ValueError:
                raise
            except Exception as error:  # Orbax and TensorStore raise many kinds
                raise ValueError(f"{self.path}: the Orbax checkpoint cannot be read: {error}") from None
        arrays = [restored[path_name(path)] for path, _ in leaves]
        return [
            _put(widen[path](array), sharding) if path in widen else array
            for (path, _), array, sharding in zip(leaves, arrays, shardings, strict=True)
        ]

    def _check(self, metadata: Any, target: Mapping[str, Any], others: set[str]) -> None:
        stored = {name: tuple(item.shape) for name, item in metadata.item_metadata.items()}
        for name, leaf in target.items():
            if name not in stored:
                raise ValueError(f"{self.path}: parameter {name} is missing")
            if stored[name] != leaf.shape:
                raise ValueError(f"{self.path}: {name} has shape {stored[name]}, expected {leaf.shape}")
        extra = sorted(set(stored) - set(target) - others)
        if extra:
            raise ValueError(f"{self.path}: parameter {extra[0]} has no place in the model")


def _put(array: np.ndarray, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def path_name(path: tuple[str | int, ...]) -> str:
    """("layers", 0, "mlp", "down") -> "layers.0.mlp.down"."""
    return ".".join(map(str, path))


def save_orbax(
    folder: Path,
    checkpoint: Checkpoint,
    parameters: Mapping[tuple[str | int, ...], jax.Array],
    config: dict[str, Any],
) -> None:
    """Writes a converted checkpoint; the tokenizer's files are the caller's.

    Args:
      folder: where to; what is missing is made.
      checkpoint: what the parameters were loaded from.
      parameters: by path in the whole model, as on one device: what a mesh repeats or pads is left out
        (`jaxinfer.models.partition.narrow`). They may lie on a mesh.
      config: for `config.json`.

    Raises:
      ValueError: the folder exists and is not empty.
    """
    import orbax.checkpoint as ocp

    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(checkpoint.generation_config, indent=2))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder.absolute() / SUBFOLDER, {path_name(path): array for path, array in parameters.items()})
