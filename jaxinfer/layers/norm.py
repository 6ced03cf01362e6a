"""Root-mean-square normalisation (arXiv 1910.07467)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.layers.linear import param


class RMSNorm(nnx.Module):
    """Normalises the last axis in float32, rounds to x's dtype, then scales."""

    def __init__(self, size: int, eps: float, *, dtype: jnp.dtype, axis: str = "embed") -> None:
        self.weight = param((size,), dtype, (axis,))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        weight = jnp.expand_dims(self.weight[...], tuple(range(x.ndim - 1)))
        return (wide * scale).astype(x.dtype) * weight
