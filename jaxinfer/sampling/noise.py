"""Stateless noise: every number is a hash of (seed, position, stream, index), so a request's tokens never depend on
its row, its neighbours, preemption, padding or how the vocabulary is split.

A row key is two 32-bit words mixed from both words of the seed, the position of the token being chosen and the
stream. The mixer is the 32-bit finaliser "lowbias32" found by C. Wellons' hash prospector (public domain).
"""

from __future__ import annotations

from enum import IntEnum

import jax
import jax.numpy as jnp


class Stream(IntEnum):
    """What a draw is for; streams of one position are independent."""

    SAMPLE = 0
    ACCEPT = 1
    DRAFT = 2
    TILE = 3


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def row_keys(seeds: jax.Array, positions: jax.Array, stream: Stream) -> jax.Array:
    """uint32 [S, 2] from seeds uint32 [S, 2] (low and high word) and positions int32 [S]."""
    low, high = seeds[:, 0], seeds[:, 1]
    position = positions.astype(jnp.uint32)
    state = _mix(low + jnp.uint32(0x9E3779B9))
    state = _mix(state ^ (high + jnp.uint32(0x7F4A7C15)))
    state = _mix(state ^ (position * jnp.uint32(0x85EBCA6B) + jnp.uint32(int(stream))))
    return jnp.stack([state, _mix(state + jnp.uint32(0x6A09E667))], axis=1)


def gumbel(keys: jax.Array, indices: jax.Array) -> jax.Array:
    """Gumbel noise float32 [S, n] for row keys uint32 [S, 2] and indices int32 [S, n] or [1, n].

    -log(-log1p(-w)) for w uniform in (0, 1) with 32 bits: w near 0 gives the large values that win, and that is where
    floating point is finest.
    """
    mixed = _mix(indices.astype(jnp.uint32) ^ keys[:, :1])
    mixed = _mix(mixed + keys[:, 1:])
    w = (mixed.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
    w = jnp.minimum(w, jnp.float32(1.0 - 2.0**-24))
    return -jnp.log(-jnp.log1p(-w))


def uniform(keys: jax.Array) -> jax.Array:
    """One uniform number in [0, 1) a row, float32 [S], from row keys uint32 [S, 2]."""
    mixed = _mix(keys[:, 0] ^ _mix(keys[:, 1]))
    return (mixed >> 8).astype(jnp.float32) * jnp.float32(2.0**-24)
