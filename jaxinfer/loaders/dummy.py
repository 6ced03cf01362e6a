"""Random weights made on the device: for benchmarks and tests, where only shapes matter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

type Path = tuple[str | int, ...]


def dummy_weights(
    leaves: Sequence[tuple[Path, jax.ShapeDtypeStruct]],
    shardings: Sequence[Sharding],
    seed: int,
    widen: Mapping[Path, Callable[[Any], Any]],
) -> list[jax.Array]:
    """Vectors (norm scales) are one, matrices normal with a deviation of 0.02; the same on every mesh.

    One small program a distinct shape: a single one for all parameters takes the better part of a minute to compile.

    Args:
      leaves: (path, abstract array), as on one device.
      shardings: where each lies.
      widen: what makes the array that a mesh has of it, for the paths that differ there.
    """
    makers: dict[tuple, Callable[[jax.Array], jax.Array]] = {}
    keys = jax.random.split(jax.random.key(seed % 2**32), len(leaves))
    made = []
    for number, ((path, leaf), sharding) in enumerate(zip(leaves, shardings, strict=True)):
        kind = (leaf.shape, leaf.dtype, sharding, path[-2:] if path in widen else None)
        if kind not in makers:
            makers[kind] = _maker(leaf, sharding, widen.get(path, lambda array: array))
        made.append(makers[kind](keys[number]))
    return made


def _maker(
    leaf: jax.ShapeDtypeStruct, sharding: Sharding, widen: Callable[[jax.Array], jax.Array]
) -> Callable[[jax.Array], jax.Array]:
    def make(key: jax.Array) -> jax.Array:
        if len(leaf.shape) == 1:
            return jnp.ones(leaf.shape, leaf.dtype)
        values = jax.random.normal(key, leaf.shape, jnp.float32).astype(leaf.dtype)
        return widen(values * jnp.asarray(0.02, leaf.dtype))

    return jax.jit(make, out_shardings=sharding)
