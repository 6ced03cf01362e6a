"""Attention over the paged cache: project, rotate, write K and V, attend, project back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.batch import AttentionMetadata
from jaxinfer.config import Kernels, ModelConfig
from jaxinfer.kernels.linear import qkv_rope_kv_update
from jaxinfer.kernels.paged_attention import paged_attention
from jaxinfer.layers.linear import AttentionOutput, QKVProjection
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.stream import ONE_DEVICE, Stream, Sums

type KVCache = tuple[jax.Array, jax.Array]
"""A layer's K and V arrays, each [num_blocks, kv_heads, block_size, head_dim]."""


class Attention(nnx.Module):
    """Grouped-query attention, with QK-norm and QKV bias where the model has them."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, kernels: Kernels, sums: Sums = ONE_DEVICE) -> None:
        sizes = (config.hidden_size, config.num_kv_heads, config.group_size, config.head_dim)
        self.qkv = QKVProjection(*sizes, dtype=dtype, has_bias=config.has_qkv_bias, implementation=kernels.linear)
        self.out = AttentionOutput(*sizes, dtype=dtype, implementation=kernels.linear, sums=sums)

        def head_norm() -> RMSNorm | None:
            if not config.has_qk_norm:
                return None
            return RMSNorm(config.head_dim, config.rms_norm_eps, dtype=dtype, axis="head_dim")

        self.q_norm, self.k_norm = head_norm(), head_norm()
        self.kernels = kernels
        self.eps = config.rms_norm_eps
        self.scale = config.head_dim**-0.5

    def __call__(
        self,
        stream: Stream,
        cos: jax.Array,
        sin: jax.Array,
        meta: AttentionMetadata,
        cache: KVCache,
        *,
        norm: RMSNorm,
        next_norm: jax.Array | None = None,
    ) -> tuple[Stream, KVCache]:
        """Reads the norm of the stream and adds to the stream; and the layer's updated cache."""
        x, missing = stream.normalise(norm)
        q, k_cache, v_cache = qkv_rope_kv_update(
            x,
            self.qkv.weight[...],
            *cache,
            cos,
            sin,
            meta.slot_mapping,
            norm_weight=None if missing is None else missing.weight[...],
            bias=None if self.qkv.bias is None else self.qkv.bias[...],
            q_norm=None if self.q_norm is None else self.q_norm.weight[...],
            k_norm=None if self.k_norm is None else self.k_norm.weight[...],
            eps=self.eps,
            implementation=self.kernels.linear,
            update_implementation=self.kernels.kv_update,
            step_plan=meta.update_plan,
        )
        attended = paged_attention(
            q,
            k_cache,
            v_cache,
            meta.block_tables,
            meta.seq_lens,
            meta.query_start_loc,
            scale=self.scale,
            implementation=self.kernels.attention,
            step_plan=meta.plan,
        )
        kv_heads = k_cache.shape[1]
        attended = attended.reshape(x.shape[0], kv_heads, -1, q.shape[-1])
        return self.out(attended, stream, next_norm=next_norm, channel=meta.channel), (k_cache, v_cache)
