"""Collectives that model code calls; they are nothing where an axis has one device."""

from __future__ import annotations

import jax


def all_reduce(x: jax.Array, axis_name: str | None) -> jax.Array:
    """The sum of `x` over the devices of a mesh axis; `x` itself without one (None)."""
    return x if axis_name is None else jax.lax.psum(x, axis_name)
