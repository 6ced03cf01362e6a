"""The KV cache's arrays, and how many blocks fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.layers import KVCache

type Device = Any
"""A `jax.Device`, which type checkers take for a variable."""

CPU_POOL_BYTES = 1 << 30
CPU_POOL_TOKENS = 8192
"""On a CPU the pool holds this many tokens, or one longest request if that is more: touching memory takes time."""
BLOCK_GRID = 64
"""Automatic sizes are multiples of this: `num_blocks` is part of every program's shape, so of the cache's key."""


@dataclass(frozen=True)
class MemoryAccount:
    """Where device memory goes, in bytes."""

    total: int
    weights: int
    temporaries: int
    block: int
    num_blocks: int

    @property
    def pool(self) -> int:
        return self.block * self.num_blocks


def block_bytes(config: ModelConfig, block_size: int, dtype: str) -> int:
    """Bytes of one block over all layers, K and V."""
    return config.kv_bytes_per_token(jnp.dtype(dtype).itemsize) * block_size


def make_caches(config: ModelConfig, num_blocks: int, block_size: int, dtype: str) -> list[KVCache]:
    """Zeroed K and V of every layer: 0 x NaN would poison masked positions."""
    shape = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
    return [(jnp.zeros(shape, jnp.dtype(dtype)), jnp.zeros(shape, jnp.dtype(dtype))) for _ in range(config.num_layers)]


def size_pool(
    engine: EngineConfig, config: ModelConfig, *, weights: int, temporaries: int, device: Device
) -> MemoryAccount:
    """How many blocks there will be: what was asked for, or what memory holds.

    Args:
      engine: resolved.
      weights: bytes of the parameters on the device.
      temporaries: bytes of the largest step's temporaries and the sampler's state.

    Raises:
      ValueError: not even two blocks fit; says what takes the memory.
    """
    assert engine.block_size is not None
    assert engine.max_num_seqs is not None
    block = block_bytes(config, engine.block_size, engine.dtype)
    longest = engine.max_model_len or config.max_position_embeddings
    most = max(longest, CPU_POOL_TOKENS) if device.platform == "cpu" else engine.max_num_seqs * longest
    wanted = -(-most // engine.block_size) + 1
    total, available = _memory(engine, device, weights + temporaries)
    if engine.num_blocks is not None:
        return MemoryAccount(total, weights, temporaries, block, engine.num_blocks)
    fitting = min(wanted, available // block)
    keeps = fitting == wanted or fitting < 2 * BLOCK_GRID
    num_blocks = fitting if keeps else fitting // BLOCK_GRID * BLOCK_GRID
    if num_blocks < 2:
        raise ValueError(
            f"no room for a KV cache: of {total / 1e9:.1f} GB x {engine.memory_utilization}, weights take "
            f"{weights / 1e9:.2f} GB and step temporaries {temporaries / 1e9:.2f} GB; "
            f"a block takes {block / 1e6:.2f} MB"
        )
    return MemoryAccount(total, weights, temporaries, block, num_blocks)


def _memory(engine: EngineConfig, device: Device, taken: int) -> tuple[int, int]:
    """(memory of the device, what of it the pool may have)."""
    if device.platform == "cpu":
        return CPU_POOL_BYTES + taken, CPU_POOL_BYTES
    stats = device.memory_stats() or {}
    total = stats.get("bytes_limit", 0)
    others = max(stats.get("bytes_in_use", 0) - taken, 0)
    return total, int(total * engine.memory_utilization) - taken - others
