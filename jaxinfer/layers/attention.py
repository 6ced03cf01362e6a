"""Attention over the paged cache: project, rotate, write K and V, attend, project back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.batch import AttentionMetadata
from jaxinfer.config import ModelConfig
from jaxinfer.kernels.kv_update import kv_update
from jaxinfer.kernels.paged_attention import paged_attention
from jaxinfer.layers.linear import AttentionOutput, QKVProjection
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rotary import apply_rotary

type KVCache = tuple[jax.Array, jax.Array]
"""A layer's K and V arrays, each [num_blocks, kv_heads, block_size, head_dim]."""


class Attention(nnx.Module):
    """Grouped-query attention, with QK-norm and QKV bias where the model has them."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, implementation: str) -> None:
        sizes = (config.hidden_size, config.num_kv_heads, config.group_size, config.head_dim)
        self.qkv = QKVProjection(*sizes, dtype=dtype, has_bias=config.has_qkv_bias)
        self.out = AttentionOutput(*sizes, dtype=dtype)

        def head_norm() -> RMSNorm | None:
            if not config.has_qk_norm:
                return None
            return RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, axis="head_dim")

        self.q_norm, self.k_norm = head_norm(), head_norm()
        self.implementation = implementation
        self.scale = config.head_dim**-0.5

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, meta: AttentionMetadata, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """[T, hidden] -> [T, hidden] and the layer's updated cache."""
        q, k, v = self.qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        k_cache, v_cache = kv_update(*cache, k, v, meta.slot_mapping)
        heads = q.reshape(q.shape[0], -1, q.shape[-1])
        attended = paged_attention(
            heads,
            k_cache,
            v_cache,
            meta.block_tables,
            meta.seq_lens,
            meta.query_start_loc,
            scale=self.scale,
            implementation=self.implementation,
            step_plan=meta.plan,
        )
        return self.out(attended.reshape(q.shape)), (k_cache, v_cache)
