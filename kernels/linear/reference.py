"""The specification of `linear`, in plain jnp."""

from __future__ import annotations

import string

import jax
import jax.numpy as jnp

MANY_ROWS = 128
"""From here on the product itself rounds its float32 sums as it stores them: what XLA calls on a GPU stores float32
otherwise, and a second pass rounds, 71 us after the 539 of gate and up of an 8B model at 2,048 rows (H200). With fewer
rows XLA splits the sums and rounds where it adds the parts. Wherever it splits them, the parts are float32."""


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
    stored = x.dtype if x.shape[0] >= MANY_ROWS else jnp.dtype(jnp.float32)
    out = jnp.einsum(spec, x, weight, precision=precision, preferred_element_type=stored).astype(x.dtype)
    if bias is not None:
        out = out + bias[None]
    if activation == "silu":
        out = jax.nn.silu(out[:, 0].astype(jnp.float32)).astype(out.dtype) * out[:, 1]
    return out if residual is None else residual + out


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square normalisation (arXiv 1910.07467) in float32, rounded to x's dtype before it is scaled."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight[None]
