"""Choosing one token a row from processed logits."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.sampling.noise import Stream, gumbel, row_keys

TILE = 128
"""Ids a tile of the two-level draw. Fixed, and a divisor of every shard of a vocabulary."""


def argmax_lowest(logits: jax.Array) -> jax.Array:
    """int32 [S]: the lowest id among equal maxima."""
    return jnp.argmax(logits, axis=1).astype(jnp.int32)


def draw(logits: jax.Array, seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """One id a row with probability softmax(logits): Gumbel-max in two levels.

    First a tile of `TILE` ids with probability proportional to its sum, then an id inside it: exact, a hundredth of
    the draws, and independent of padding and of how tiles are spread over devices.

    Args:
      logits: float32 [S, V] with maximum 0.
      seeds: uint32 [S, 2].
      positions: int32 [S]: the chosen token's.
    """
    num_rows, vocab = logits.shape
    num_tiles = -(-vocab // TILE)
    padded = jnp.pad(logits, ((0, 0), (0, num_tiles * TILE - vocab)), constant_values=-jnp.inf)
    tiles = padded.reshape(num_rows, num_tiles, TILE)
    maxima = jnp.max(tiles, axis=2)
    safe = jnp.where(jnp.isfinite(maxima), maxima, 0.0)
    masses = jnp.log(jnp.sum(jnp.exp(tiles - safe[:, :, None]), axis=2)) + safe  # -inf for an empty tile
    numbers = jnp.arange(num_tiles, dtype=jnp.int32)[None, :]
    tile = argmax_lowest(masses + gumbel(row_keys(seeds, positions, Stream.TILE), numbers))
    inside = jnp.take_along_axis(tiles, tile[:, None, None], axis=1)[:, 0]
    ids = tile[:, None] * TILE + jnp.arange(TILE, dtype=jnp.int32)[None, :]
    noise = gumbel(row_keys(seeds, positions, Stream.SAMPLE), ids)
    return tile * TILE + argmax_lowest(inside + noise)


def choose(logits: jax.Array, temperature: jax.Array, seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """Greedy where temperature is 0, drawn elsewhere; `logits` are processed and have maximum 0."""
    return jnp.where(temperature > 0, draw(logits, seeds, positions), argmax_lowest(logits))
