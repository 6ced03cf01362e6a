"""The dense decoder-only transformer that all families here are variants of."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.batch import AttentionMetadata
from jaxinfer.config import Kernels, ModelConfig
from jaxinfer.kernels import kv_update, paged_attention
from jaxinfer.layers import (
    Attention,
    Embedding,
    GatedMLP,
    KVCache,
    RMSNorm,
    attention_factor,
    compute_logits,
    inverse_frequencies,
    rotary_angles,
)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, kernels: Kernels) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, kernels=kernels)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        sizes = (config.hidden_size, config.intermediate_size)
        self.mlp = GatedMLP(*sizes, dtype=dtype, implementation=kernels.linear)

    def __call__(
        self, x: jax.Array, cos: jax.Array, sin: jax.Array, meta: AttentionMetadata, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        with jax.named_scope("attention"):
            x, cache = self.attention(x, cos, sin, meta, cache, norm=self.input_norm)
        with jax.named_scope("mlp"):
            return self.mlp(x, norm=self.mlp_norm, residual=x), cache


class DenseModel(nnx.Module):
    """Embedding, layers, final norm and head. Build it under `nnx.eval_shape`: loaders fill the parameters.

    Args:
      config: dimensions.
      dtype: of parameters and activations.
      kernels: implementations of the kernels; a name stands for all of them.
    """

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, kernels: Kernels | str = "reference") -> None:
        kernels = kernels if isinstance(kernels, Kernels) else Kernels.all(kernels)
        self.embed = Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.layers = nnx.List([DecoderLayer(config, dtype=dtype, kernels=kernels) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        head = None if config.tie_word_embeddings else Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        self.head = head
        self.kernels = kernels
        self.attention_sizes = (config.num_heads, config.num_kv_heads, config.head_dim)
        self.rotary_factor = attention_factor(config.rope)
        self.frequencies = tuple(inverse_frequencies(config.rope, config.head_dim).tolist())

    def __call__(
        self, token_ids: jax.Array, meta: AttentionMetadata, caches: list[KVCache], *, is_decode: bool = False
    ) -> tuple[jax.Array, list[KVCache]]:
        """int32 [T] -> the last layer's normalised output [T, hidden], and every layer's updated cache.

        `is_decode` promises that no row has more than one token.
        """
        meta = self._with_plans(meta, caches[0][0].dtype, is_decode=is_decode)
        x = self.embed(token_ids)
        frequencies = jnp.asarray(self.frequencies, jnp.float32)
        cos, sin = rotary_angles(meta.positions, frequencies, self.rotary_factor)
        updated = []
        for layer, cache in zip(self.layers, caches, strict=True):
            graph, state = nnx.split(layer)
            leaves, tree = jax.tree.flatten(state)
            x, cache = _run_layer((graph, tree), leaves, x, cos, sin, meta, cache)
            updated.append(cache)
        return self.norm(x), updated

    def _with_plans(self, meta: AttentionMetadata, cache_dtype: jnp.dtype, *, is_decode: bool) -> AttentionMetadata:
        """What the kernels of all layers share."""
        num_heads, num_kv_heads, head_dim = self.attention_sizes
        attention_plan = paged_attention.plan(
            self.kernels.attention,
            meta.seq_lens,
            meta.query_start_loc,
            num_tokens=meta.positions.shape[0],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            cache_dtype=cache_dtype,
            is_decode=is_decode,
        )
        update_plan = kv_update.plan(self.kernels.kv_update, meta.slot_mapping)
        return dataclasses.replace(meta, plan=attention_plan, update_plan=update_plan)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[S, hidden] -> float32 [S, vocab]."""
        with jax.named_scope("head"):
            return compute_logits(hidden, self.embed if self.head is None else self.head)


@partial(jax.jit, static_argnums=0)
def _run_layer(
    static: tuple[Any, Any],
    leaves: list[jax.Array],
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    meta: AttentionMetadata,
    cache: KVCache,
) -> tuple[jax.Array, KVCache]:
    """One layer. An inner jit with the parameters as arguments: equal layers are traced and lowered once."""
    graph, tree = static
    layer = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
    return layer(x, cos, sin, meta, cache)
