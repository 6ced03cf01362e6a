"""The KV cache's arrays."""

from __future__ import annotations

import jax.numpy as jnp

from jaxinfer.config import ModelConfig
from jaxinfer.layers import KVCache


def block_bytes(config: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one block over all layers, K and V."""
    return config.kv_bytes_per_token(jnp.dtype(dtype).itemsize) * block_size


def make_caches(config: ModelConfig, num_blocks: int, block_size: int, dtype: str) -> list[KVCache]:
    """Zeroed K and V of every layer: 0 x NaN would poison masked positions."""
    shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
    return [(jnp.zeros(shape, jnp.dtype(dtype)), jnp.zeros(shape, jnp.dtype(dtype))) for _ in range(config.num_layers)]
