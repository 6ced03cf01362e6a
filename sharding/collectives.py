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


def columns_to_rows(x: jax.Array, axis_name: str | None, num_columns: int) -> jax.Array:
    """[S, n], each device's columns -> [ceil(S / devices), num_columns], each device's rows, with all columns.

    Columns that pad are dropped, rows of zeros fill up what does not come out. A device sends and keeps what it had.
    """
    if axis_name is None:
        return x
    padded = jnp.pad(x, ((0, -x.shape[0] % jax.lax.axis_size(axis_name)), (0, 0)))
    return jax.lax.all_to_all(padded, axis_name, split_axis=0, concat_axis=1, tiled=True)[:, :num_columns]


def own_rows(x: jax.Array, axis_name: str | None) -> jax.Array:
    """[S, ...] on every device -> [ceil(S / devices), ...]: the rows that `columns_to_rows` leaves this device."""
    if axis_name is None:
        return x
    num_devices = jax.lax.axis_size(axis_name)
    padded = jnp.pad(x, ((0, -x.shape[0] % num_devices), *[(0, 0)] * (x.ndim - 1)))
    size = padded.shape[0] // num_devices
    return jax.lax.dynamic_slice_in_dim(padded, axis_index(axis_name) * size, size)


def gather_rows(x: jax.Array, axis_name: str | None, num_rows: int) -> jax.Array:
    """[ceil(S / devices), ...], each device's rows -> [num_rows, ...] on all."""
    return x if axis_name is None else jax.lax.all_gather(x, axis_name, tiled=True)[:num_rows]


def axis_index(axis_name: str | None) -> jax.Array:
    """int32: this device's place along a mesh axis."""
    return jnp.int32(0) if axis_name is None else jax.lax.axis_index(axis_name)
