"""The KV cache's sizes."""

from __future__ import annotations

import jax.numpy as jnp

from jaxinfer.config import ModelConfig


def block_bytes(config: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one block over all layers, K and V; on a mesh, of one device's part of the model."""
    return config.kv_bytes_per_token(jnp.dtype(dtype).itemsize) * block_size
