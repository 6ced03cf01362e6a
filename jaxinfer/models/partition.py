"""How a model is cut for a mesh: what is repeated or padded so that everything divides, and one device's part.

Along the pipe axis it is cut into stages, layers that follow each other; along the tensor axis each of them is divided.

With more devices than KV heads each head lies on several, with a part of the query heads that read it:

    KV heads 2, query heads 8, tensor 4        device 0    1     2     3
                                         query heads  01    23    45    67
                                            KV heads  0     0     1     1
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxinfer.config import ModelConfig
from jaxinfer.kernels.sampling.reference import TILE
from jaxinfer.sharding.mesh import stage_meshes, tensor_axis

type Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Partition:
    """A model, or a stage of one, on a mesh."""

    model: ModelConfig  # as the checkpoint has it
    whole: ModelConfig  # as the mesh has it: the stage's layers, KV heads repeated, vocabulary padded
    local: ModelConfig  # one device's part
    mesh: Mesh | None  # None is the default device alone
    first_layer: int = 0  # of the stage

    @property
    def is_first(self) -> bool:
        """Whether the embedding is here."""
        return self.first_layer == 0

    @property
    def is_last(self) -> bool:
        """Whether the final norm and the head are here."""
        return self.first_layer + self.whole.num_layers == self.model.num_layers

    def path_in_model(self, path: Path) -> Path:
        """The path of one of the stage's parameters -> its path in the whole model, which counts all layers."""
        match path:
            case ("layers", int(number), *rest):
                return ("layers", number + self.first_layer, *rest)
        return path

    @property
    def axis_name(self) -> str | None:
        """Over which sums go; None where nothing is divided."""
        return tensor_axis(self.mesh)


def cut_stages(model: ModelConfig, mesh: Mesh | None, layers: Sequence[int] | None = None) -> list[Partition]:
    """Cuts a model along the pipe axis and each stage along the tensor axis.

    Args:
      model: as the checkpoint has it.
      mesh: with a place on the pipe axis a stage; None is one device.
      layers: of each stage; None divides them evenly, the first stages having one more where that does not come out.

    Raises:
      ValueError: layers that do not come to the model's, or stages without one, with the numbers; or `divide`'s.
    """
    meshes = stage_meshes(mesh)
    size, total = len(meshes), model.num_layers
    if layers is None:
        if total < size:
            raise ValueError(f"the model's num_layers, {total}, are too few for pipe={size}")
        layers = [total // size + (place < total % size) for place in range(size)]
    if len(layers) != size or sum(layers) != total or min(layers) < 1:
        shown = ",".join(map(str, layers))
        raise ValueError(f"pipe_layers {shown} must be {size} numbers of at least 1 (pipe={size}) with the sum {total}")
    starts = accumulate(layers, initial=0)
    return [divide(model, *stage) for stage in zip(meshes, starts, layers, strict=False)]


def divide(model: ModelConfig, mesh: Mesh | None, first_layer: int = 0, num_layers: int | None = None) -> Partition:
    """Cuts a model, or a stage of it, along the tensor axis.

    Raises:
      ValueError: query heads or feed-forward columns that the axis does not divide, with both numbers.
    """
    axis = tensor_axis(mesh)
    stage = model if num_layers is None else dataclasses.replace(model, num_layers=num_layers)
    if axis is None or mesh is None:
        return Partition(model, stage, stage, mesh, first_layer)
    size = mesh.shape[axis]
    for name in ("num_heads", "intermediate_size"):
        if getattr(model, name) % size:
            raise ValueError(f"the model's {name}, {getattr(model, name)}, cannot be divided among {axis}={size}")
    whole = dataclasses.replace(
        stage,
        num_kv_heads=math.lcm(model.num_kv_heads, size),
        vocab_size=-(-model.vocab_size // (size * TILE)) * size * TILE,
    )
    local = dataclasses.replace(
        whole,
        num_heads=whole.num_heads // size,
        num_kv_heads=whole.num_kv_heads // size,
        intermediate_size=whole.intermediate_size // size,
        vocab_size=whole.vocab_size // size,
    )
    return Partition(model, whole, local, mesh, first_layer)


def own_shape(path: Path, shape: tuple[int, ...], partition: Partition) -> tuple[int, ...]:
    """The shape of a parameter as a checkpoint for one device has it, from its shape on the mesh."""
    model = partition.model
    match path:
        case ("embed" | "head", "weight"):
            return (model.vocab_size, *shape[1:])
        case (*_, "qkv", "weight" | "bias"):
            return (*shape[:-3], model.num_kv_heads, model.group_size + 2, shape[-1])
        case (*_, "attention", "out", "weight"):
            return (model.num_kv_heads, model.group_size, *shape[2:])
    return shape


def widen(path: Path, array: Any, partition: Partition) -> Any:
    """A parameter as a checkpoint for one device has it -> as the mesh has it. `array` is NumPy's or jax's."""
    xp, whole = array.__array_namespace__(), partition.whole
    match path:
        case ("embed" | "head", "weight"):
            return xp.pad(array, ((0, whole.vocab_size - array.shape[0]), (0, 0)))
        case (*_, "qkv", "weight" | "bias"):
            heads, rows, dim = array.shape[-3:]
            q, kv = array[..., : rows - 2, :], array[..., rows - 2 :, :]
            q = q.reshape(*array.shape[:-3], whole.num_kv_heads, whole.group_size, dim)
            return xp.concatenate([q, xp.repeat(kv, whole.num_kv_heads // heads, axis=-3)], axis=-2)
        case (*_, "attention", "out", "weight"):
            return array.reshape(whole.num_kv_heads, whole.group_size, *array.shape[2:])
    return array


def narrow(path: Path, array: Any, partition: Partition) -> Any:
    """A parameter as the mesh has it -> as a checkpoint for one device has it: what `widen` undoes.

    `array` is jax's or NumPy's; the mesh's shards stay where they are as far as that goes.
    """
    if own_shape(path, array.shape, partition) == array.shape:
        return array  # nothing is repeated or padded
    xp, whole, model = array.__array_namespace__(), partition.whole, partition.model
    match path:
        case ("embed" | "head", "weight"):
            return array[: model.vocab_size]
        case (*_, "qkv", "weight" | "bias"):
            q, kv = array[..., : whole.group_size, :], array[..., whole.group_size :, :]
            q = q.reshape(*array.shape[:-3], model.num_kv_heads, model.group_size, array.shape[-1])
            return xp.concatenate([q, kv[..., :: whole.num_kv_heads // model.num_kv_heads, :, :]], axis=-2)
    return array.reshape(model.num_kv_heads, model.group_size, *array.shape[2:])  # attention's output


def own_place(path: Path, place: tuple[jax.Array, ...], partition: Partition) -> tuple[jax.Array, ...]:
    """Where an element of a parameter on the mesh stands in a checkpoint for one device; beyond its end for padding.

    Args:
      place: indices into the parameter's dimensions, int32 of shapes that broadcast.
    """
    whole, model = partition.whole, partition.model
    copies, behind = whole.num_kv_heads // model.num_kv_heads, model.group_size - whole.group_size
    match path:
        case (*_, "qkv", "weight" | "bias"):
            *before, head, row, dim = place
            query = head % copies * whole.group_size + row
            return (*before, head // copies, jnp.where(row < whole.group_size, query, row + behind), dim)
        case (*_, "attention", "out", "weight"):
            head, query, *after = place
            return (head // copies, head % copies * whole.group_size + query, *after)
    return place
