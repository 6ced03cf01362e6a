"""The specification of `all_reduce` and `all_reduce_norm`: gather, then add in the order of the ranks."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def all_reduce(x: jax.Array, axis_name: str) -> jax.Array:
    """See `api.all_reduce`."""
    return _sum(x, axis_name).astype(x.dtype)


def all_reduce_norm(
    x: jax.Array, residual: jax.Array, weight: jax.Array, axis_name: str, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.all_reduce_norm`."""
    return add_norm(_sum(x, axis_name), residual, weight, eps)


def add_norm(total: jax.Array, residual: jax.Array, weight: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """What follows the sum: float32 [T, hidden] -> the normalised rows and the new residual, in residual's dtype."""
    residual = (residual.astype(jnp.float32) + total).astype(residual.dtype)
    wide = residual.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(residual.dtype) * weight[None], residual


def _sum(x: jax.Array, axis_name: str) -> jax.Array:
    """float32, from rank 0 on."""
    total, *rest = (part.astype(jnp.float32) for part in jax.lax.all_gather(x, axis_name))
    for part in rest:
        total = total + part
    return total
