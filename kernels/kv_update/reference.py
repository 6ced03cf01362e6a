"""The specification of `kv_update` and `rope_kv_update`. With donated caches they write in place on CPU and GPU."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def kv_update(
    k_cache: jax.Array,
    v_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.kv_update`: a scatter."""
    block_size = k_cache.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    k_cache = k_cache.at[blocks, :, offsets].set(quantise(k, k_cache.dtype, k_scale))
    v_cache = v_cache.at[blocks, :, offsets].set(quantise(v, v_cache.dtype, v_scale))
    return k_cache, v_cache


def rope(
    qkv: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    *,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 1e-6,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `api.rope_kv_update` does before it writes: q [T, heads, head_dim], k and v [T, kv_heads, head_dim]."""
    num_tokens, _, _, head_dim = qkv.shape
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    return q.reshape(num_tokens, -1, head_dim), k, v


def quantise(x: jax.Array, dtype: jnp.dtype, scale: jax.Array | None) -> jax.Array:
    """`x / scale` in `dtype`. Eight-bit floats saturate: beyond their largest value float8_e4m3fn knows only NaN."""
    if scale is not None:
        x = x.astype(jnp.float32) / scale
    if jnp.dtype(dtype).itemsize == 1:
        largest = float(jnp.finfo(dtype).max)
        x = jnp.clip(x.astype(jnp.float32), -largest, largest)
    return x.astype(dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Normalises the last axis in float32, rounds to x's dtype, then scales (arXiv 1910.07467)."""
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * jnp.expand_dims(weight, tuple(range(x.ndim - 1)))


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates [T, ..., head_dim] by [T, head_dim / 2]: component i with component i + head_dim / 2, in float32."""
    shape = (cos.shape[0], *([1] * (x.ndim - 2)), cos.shape[1])
    cos, sin = cos.reshape(shape), sin.reshape(shape)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1).astype(x.dtype)
