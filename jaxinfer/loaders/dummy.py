"""Random weights made on the device: for benchmarks and tests, where only shapes matter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Sharding


def dummy_weights(leaves: Sequence[jax.ShapeDtypeStruct], shardings: Sequence[Sharding], seed: int) -> list[jax.Array]:
    """Vectors (norm scales) are one, matrices normal with a deviation of 0.02.

    One small program a distinct shape: a single one for all parameters takes the better part of a minute to compile.
    """
    makers: dict[tuple, Callable[[jax.Array], jax.Array]] = {}
    keys = jax.random.split(jax.random.key(seed % 2**32), len(leaves))
    made = []
    for number, (leaf, sharding) in enumerate(zip(leaves, shardings, strict=True)):
        kind = (leaf.shape, leaf.dtype, sharding)
        if kind not in makers:
            makers[kind] = _maker(*kind)
        made.append(makers[kind](keys[number]))
    return made


def _maker(shape: tuple[int, ...], dtype: jnp.dtype, sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    def make(key: jax.Array) -> jax.Array:
        if len(shape) == 1:
            return jnp.ones(shape, dtype)
        return jax.random.normal(key, shape, jnp.float32).astype(dtype) * jnp.asarray(0.02, dtype)

    return jax.jit(make, out_shardings=sharding)
