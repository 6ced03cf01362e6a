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
    Stream,
    Sums,
    attention_factor,
    compute_logits,
    inverse_frequencies,
    rotary_angles,
)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the residual stream."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, kernels: Kernels, sums: Sums) -> None:
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        self.attention = Attention(config, dtype=dtype, kernels=kernels, sums=sums)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)
        sizes = (config.hidden_size, config.intermediate_size)
        self.mlp = GatedMLP(*sizes, dtype=dtype, implementation=kernels.linear, sums=sums)
        self.has_norm_in_sums = sums.has_norm

    def __call__(
        self,
        stream: Stream,
        cos: jax.Array,
        sin: jax.Array,
        meta: AttentionMetadata,
        cache: KVCache,
        next_norm: jax.Array | None,
    ) -> tuple[Stream, KVCache]:
        """`next_norm`: the weight of the norm that follows this layer, where the layer's last sum may do it."""
        middle = self.mlp_norm.weight[...] if self.has_norm_in_sums else None
        with jax.named_scope("attention"):
            stream, cache = self.attention(stream, cos, sin, meta, cache, norm=self.input_norm, next_norm=middle)
        with jax.named_scope("mlp"):
            return self.mlp(stream, norm=self.mlp_norm, next_norm=next_norm, channel=meta.channel), cache


class DenseModel(nnx.Module):
    """Embedding, layers, final norm and head, or a stage of that. Build it under `nnx.eval_shape`: loaders fill the
    parameters.

    Args:
      config: dimensions.
      dtype: of parameters and activations.
      kernels: implementations of the kernels; a name stands for all of them.
      vocab_size: ids that exist, where the configuration's number is padded for a mesh.
      axis_name: the mesh axis that the model is cut over; then it is called inside a `shard_map`, with parameters and
        caches of one device's shapes. None is one device.
      is_first: has the embedding; a stage without it goes on with the residual stream of the stage before.
      is_last: has the final norm and the head.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: jnp.dtype,
        kernels: Kernels | str = "reference",
        vocab_size: int | None = None,
        axis_name: str | None = None,
        is_first: bool = True,
        is_last: bool = True,
    ) -> None:
        kernels = kernels if isinstance(kernels, Kernels) else Kernels.all(kernels)

        def table() -> Embedding:
            sizes = (config.vocab_size, config.hidden_size)
            return Embedding(*sizes, dtype=dtype, vocab_size=vocab_size, axis_name=axis_name)

        def layer() -> DecoderLayer:
            return DecoderLayer(config, dtype=dtype, kernels=kernels, sums=self.sums)

        self.sums = Sums(axis_name, kernels.all_reduce, config.rms_norm_eps)
        is_tied = config.tie_word_embeddings
        self.embed = table() if is_first or (is_last and is_tied) else None
        self.layers = nnx.List([layer() for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype) if is_last else None
        self.head = table() if is_last and not is_tied else None
        self.kernels = kernels
        self.group_size, self.axis_name = config.group_size, axis_name
        self.rotary_factor = attention_factor(config.rope)
        self.frequencies = tuple(inverse_frequencies(config.rope, config.head_dim).tolist())

    def __call__(
        self,
        token_ids: jax.Array,
        meta: AttentionMetadata,
        caches: list[KVCache],
        *,
        is_decode: bool = False,
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, list[KVCache]]:
        """int32 [T] -> the last layer's normalised output [T, hidden], and every layer's updated cache.

        `is_decode` promises that no row has more than one token. A stage that is not the first needs the `residual`
        [T, hidden] that the one before returned; one that is not the last returns its own.
        """
        meta = self._with_plans(meta, caches[0][0], is_decode=is_decode)
        if residual is None:
            assert self.embed is not None
            residual = self.embed(token_ids)
        stream = Stream(residual)
        frequencies = jnp.asarray(self.frequencies, jnp.float32)
        cos, sin = rotary_angles(meta.positions, frequencies, self.rotary_factor)
        updated = []
        following = [*(layer.input_norm for layer in self.layers[1:]), self.norm]
        for layer, cache, norm in zip(self.layers, caches, following, strict=True):
            graph, state = nnx.split(layer)
            leaves, tree = jax.tree.flatten(state)
            next_norm = norm.weight[...] if norm is not None and self.sums.has_norm else None
            stream, cache = _run_layer((graph, tree), leaves, stream, cos, sin, meta, cache, next_norm)
            updated.append(cache)
        if self.norm is None:
            return stream.residual, updated
        return self.norm(stream.residual) if stream.normed is None else stream.normed, updated

    def _with_plans(self, meta: AttentionMetadata, cache: jax.Array, *, is_decode: bool) -> AttentionMetadata:
        """What the kernels of all layers share."""
        _, num_kv_heads, _, head_dim = cache.shape
        attention_plan = paged_attention.plan(
            self.kernels.attention,
            meta.seq_lens,
            meta.query_start_loc,
            num_tokens=meta.positions.shape[0],
            num_heads=num_kv_heads * self.group_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            cache_dtype=cache.dtype,
            is_decode=is_decode,
        )
        update_plan = kv_update.plan(self.kernels.kv_update, meta.slot_mapping)
        return dataclasses.replace(meta, plan=attention_plan, update_plan=update_plan)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[S, hidden] -> float32 [S, vocab], on a mesh this device's part of it."""
        head = self.embed if self.head is None else self.head
        assert head is not None
        with jax.named_scope("head"):
            return compute_logits(hidden, head)


@partial(jax.jit, static_argnums=0)
def _run_layer(
    static: tuple[Any, Any],
    leaves: list[jax.Array],
    stream: Stream,
    cos: jax.Array,
    sin: jax.Array,
    meta: AttentionMetadata,
    cache: KVCache,
    next_norm: jax.Array | None,
) -> tuple[Stream, KVCache]:
    """One layer. An inner jit with the parameters as arguments: equal layers are traced and lowered once."""
    graph, tree = static
    layer = nnx.merge(graph, jax.tree.unflatten(tree, leaves))
    return layer(stream, cos, sin, meta, cache, next_norm)
