"""Random weights made on the device: for benchmarks and tests, where only shapes matter."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Sharding


def dummy_weights(leaves: Sequence[jax.ShapeDtypeStruct], shardings: Sequence[Sharding], seed: int) -> list[jax.Array]:
    """Vectors (norm scales) are one, matrices normal with a deviation of 0.02; made by one program."""
    shapes = tuple((leaf.shape, jnp.dtype(leaf.dtype)) for leaf in leaves)

    @partial(jax.jit, out_shardings=list(shardings))
    def make(key: jax.Array) -> list[jax.Array]:
        keys = jax.random.split(key, len(shapes))
        return [_make_leaf(keys[n], shape, dtype) for n, (shape, dtype) in enumerate(shapes)]

    return make(jax.random.key(seed % 2**32))


def _make_leaf(key: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    if len(shape) == 1:
        return jnp.ones(shape, dtype)
    return jax.random.normal(key, shape, jnp.float32).astype(dtype) * jnp.asarray(0.02, dtype)
