"""Collectives that model code calls inside a `shard_map`; they are nothing where an axis has one device (None)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def all_reduce(x: jax.Array, axis_name: str | None) -> jax.Array:
    """The sum of `x` over the devices of a mesh axis.

    Every sum of a step goes through here: the place for a faster all-reduce than XLA's.
    """
    return x if axis_name is None else jax.lax.psum(x, axis_name)


def all_max(x: jax.Array, axis_name: str | None) -> jax.Array:
    """The elementwise maximum over the devices of a mesh axis."""
    return x if axis_name is None else jax.lax.pmax(x, axis_name)


def all_gather(x: jax.Array, axis_name: str | None) -> jax.Array:
    """[...] -> [devices, ...], in the order of the mesh axis; [1, ...] without one."""
    return x[None] if axis_name is None else jax.lax.all_gather(x, axis_name)


def gather_columns(x: jax.Array, axis_name: str | None, num_columns: int) -> jax.Array:
    """[S, n] on each device -> [S, num_columns] on all: the devices' columns side by side, without what pads them."""
    if axis_name is None:
        return x
    return jax.lax.all_gather(x, axis_name, axis=1, tiled=True)[:, :num_columns]


def axis_index(axis_name: str | None) -> jax.Array:
    """int32: this device's place along a mesh axis."""
    return jnp.int32(0) if axis_name is None else jax.lax.axis_index(axis_name)
