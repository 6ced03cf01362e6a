"""Stateless noise: every number is a hash of (seed, position, stream, index), so a request's tokens never depend on
its row, its neighbours, preemption, padding or how the vocabulary is split.

A row key is two 32-bit words mixed from both words of the seed, the position of the token being chosen and the
stream. The mixer is the 32-bit finaliser "lowbias32" found by C. Wellons' hash prospector (public domain).
"""

from __future__ import annotations

from enum import IntEnum

import jax
import jax.numpy as jnp
import numpy as np


class Stream(IntEnum):
    """What a draw is for; streams of one position are independent."""

    SAMPLE = 0
    ACCEPT = 1
    DRAFT = 2
    TILE = 3


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def key_words(low: jax.Array, high: jax.Array, positions: jax.Array, stream: Stream) -> tuple[jax.Array, jax.Array]:
    """The two words of a row key, uint32, from the seed's words (uint32) and positions (int32), all of one shape."""
    state = _mix(low + np.uint32(0x9E3779B9))
    state = _mix(state ^ (high + np.uint32(0x7F4A7C15)))
    state = _mix(state ^ (positions.astype(jnp.uint32) * np.uint32(0x85EBCA6B) + np.uint32(stream)))
    return state, _mix(state + np.uint32(0x6A09E667))


def row_keys(seeds: jax.Array, positions: jax.Array, stream: Stream) -> jax.Array:
    """uint32 [S, 2] from seeds uint32 [S, 2] (low and high word) and positions int32 [S]."""
    return jnp.stack(key_words(seeds[:, 0], seeds[:, 1], positions, stream), axis=1)


def unit(first: jax.Array, second: jax.Array, indices: jax.Array) -> jax.Array:
    """float32 in (0, 1) with 32 bits from the two words of a key, uint32, and indices, int32; shapes broadcast."""
    mixed = _mix(indices.astype(jnp.uint32) ^ first)
    mixed = _mix(mixed + second)
    w = (mixed.astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    return jnp.minimum(w, np.float32(1.0 - 2.0**-24))


def gumbel(keys: jax.Array, indices: jax.Array) -> jax.Array:
    """Gumbel noise float32 [S, n] for row keys uint32 [S, 2] and indices int32 [S, n] or [1, n].

    -log(-log1p(-w)) for w uniform in (0, 1) with 32 bits: w near 0 gives the large values that win, and that is where
    floating point is finest.
    """
    return -jnp.log(-jnp.log1p(-unit(keys[:, :1], keys[:, 1:], indices)))


def uniform(keys: jax.Array) -> jax.Array:
    """One uniform number in [0, 1) a row, float32 [S], from row keys uint32 [S, 2]."""
    mixed = _mix(keys[:, 0] ^ _mix(keys[:, 1]))
    return (mixed >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
