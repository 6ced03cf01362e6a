"""Random weights made on the devices: for benchmarks and tests, where only shapes matter.

A value is a hash of seed, parameter and place, so every device makes its own part and nothing else, and a model has the
same weights on every mesh. (XLA does not divide `jax.random`: each device would make the whole array first.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jaxinfer.kernels.sampling.noise import Stream, key_words, unit
from jaxinfer.sharding.collectives import axis_index

DEVIATION = 0.02


@dataclass(frozen=True)
class Dummy:
    """A parameter to be made.

    Args:
      leaf: the abstract array, as it is to lie on its devices.
      own_shape: its shape where nothing is repeated or padded.
      own_place: indices into `leaf` (int32, shapes that broadcast) -> indices into `own_shape`; beyond it for padding.
      kind: equal for parameters with the same `own_place`.
      number: which of the whole model's parameters it is.
    """

    leaf: jax.ShapeDtypeStruct
    own_shape: tuple[int, ...]
    own_place: Callable[[tuple[jax.Array, ...]], tuple[jax.Array, ...]]
    kind: Any
    number: int


def dummy_weights(parameters: Sequence[Dummy], shardings: Sequence[Sharding], seed: int) -> list[jax.Array]:
    """Vectors (norm scales) are one, matrices normal with a deviation of 0.02, padding zero.

    One small program a distinct shape: a single one for all parameters takes the better part of a minute to compile.
    """
    makers: dict[tuple, Callable[[jax.Array], jax.Array]] = {}
    words = seed % 2**32, seed % 2**64 >> 32
    made = []
    for parameter, sharding in zip(parameters, shardings, strict=True):
        kind = (parameter.leaf.shape, parameter.leaf.dtype, sharding, parameter.own_shape, parameter.kind)
        if kind not in makers:
            makers[kind] = _maker(parameter, sharding)
        made.append(makers[kind](jnp.array([*words, parameter.number], jnp.uint32)))
    return made


def _maker(parameter: Dummy, sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    shape = sharding.shard_shape(parameter.leaf.shape)
    axes: list[Any] = [None] * len(shape)
    if isinstance(sharding, NamedSharding):
        axes[: len(sharding.spec)] = sharding.spec

    def make(words: jax.Array) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, parameter.leaf.dtype)
        place = tuple(_indices(shape, dimension, axis) for dimension, axis in enumerate(axes))
        values = _normal(parameter.own_place(place), parameter.own_shape, words)
        return (values * DEVIATION).astype(parameter.leaf.dtype)

    if not any(axes):
        return jax.jit(make, out_shardings=sharding)
    assert isinstance(sharding, NamedSharding)
    where, spec = sharding.mesh, sharding.spec
    return jax.jit(jax.shard_map(make, mesh=where, in_specs=PartitionSpec(), out_specs=spec, check_vma=False))


def _indices(shape: tuple[int, ...], dimension: int, axis: str | None) -> jax.Array:
    """A dimension's indices on this device, int32 of the rank of `shape`."""
    own = jnp.arange(shape[dimension], dtype=jnp.int32) + axis_index(axis) * shape[dimension]
    return own.reshape([-1 if number == dimension else 1 for number in range(len(shape))])


def _normal(place: tuple[jax.Array, ...], shape: tuple[int, ...], words: jax.Array) -> jax.Array:
    """Normal numbers, a hash of (words, place) each; zero for places outside of `shape`."""
    row = jnp.zeros_like(place[0])
    for index, size in zip(place[:-1], shape[:-1], strict=True):
        row = row * size + index
    assert math.prod(shape[:-1]) < 2**31, f"{shape} has too many rows"
    low, high = key_words(words[0], words[1], words[2], Stream.DRAFT)
    uniform = unit(*key_words(low, high, row, Stream.SAMPLE), place[-1])
    # the smallest would become -1, whose inverse is infinite
    normal = math.sqrt(2) * jax.lax.erf_inv(jnp.maximum(2 * uniform - 1, -1 + 2.0**-23))
    is_inside = jnp.bool_(True)
    for index, size in zip(place, shape, strict=True):
        is_inside = is_inside & (index < size)
    return jnp.where(is_inside, normal, 0.0)
