"""The specification of `linear`, in plain jnp."""

from __future__ import annotations

import string

import jax
import jax.numpy as jnp


def linear(
    x: jax.Array,
    weight: jax.Array,
    *,
    norm_weight: jax.Array | None = None,
    norm_eps: float = 1e-6,
    bias: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """See `api.linear`."""
    if norm_weight is not None:
        x = rms_norm(x, norm_weight, norm_eps)
    inputs = string.ascii_lowercase[: x.ndim - 1]
    outputs = string.ascii_uppercase[: weight.ndim - len(inputs)]
    # GPUs would multiply float32 in TF32.
    precision = "highest" if x.dtype == jnp.float32 else None
    spec = f"z{inputs},{inputs}{outputs}->z{outputs}"
    out = jnp.einsum(spec, x, weight, precision=precision, preferred_element_type=jnp.float32).astype(x.dtype)
    if bias is not None:
        out = out + bias[None]
    if activation == "silu":
        out = jax.nn.silu(out[:, 0]) * out[:, 1]
    return out if residual is None else residual + out


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalisation (arXiv 1910.07467) in float32, rounded to x's dtype before it is scaled."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight[None]
