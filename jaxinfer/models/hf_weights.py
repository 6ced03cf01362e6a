"""Where the parameters of a `DenseModel` come from in a checkpoint with Hugging Face names.

Every source reads only what the asked-for index needs, so a device's shard costs a shard's bytes.
"""

from __future__ import annotations

import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.loaders import Index, ReadTensor, Source
from jaxinfer.models.partition import Partition

type Sources = dict[tuple[str | int, ...], Source]
"""Path of a parameter in the model -> its source."""


def direct(name: str, *shape: int) -> Source:
    """A parameter that is one tensor as it stands."""
    return Source({name: shape}, lambda read, index: read(name, index))


def padded(name: str, rows: int, columns: int) -> Source:
    """[rows, columns], followed by rows of zeros as far as the parameter goes."""

    def assemble(read: ReadTensor, index: Index) -> np.ndarray:
        wanted, others = index
        if wanted.stop <= rows:
            return read(name, index)
        empty = wanted.stop - max(wanted.start, rows)
        if wanted.start >= rows:
            return np.zeros((empty, others.stop - others.start), np.float32)
        return np.pad(read(name, (slice(wanted.start, rows), others)), ((0, empty), (0, 0)))

    return Source({name: (rows, columns)}, assemble)


def transposed(name: str, rows: int, columns: int) -> Source:
    """[rows, columns] in the checkpoint (output first), [columns, rows] here."""
    return Source({name: (rows, columns)}, lambda read, index: read(name, (index[1], index[0])).T)


def fused_gate_up(prefix: str, config: ModelConfig) -> Source:
    """[hidden, 2, mlp] from two [mlp, hidden]."""
    names = [f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight"]
    shape = (config.intermediate_size, config.hidden_size)

    def assemble(read: ReadTensor, index: Index) -> np.ndarray:
        embed, which, mlp = index
        return np.stack([read(name, (mlp, embed)).T for name in names[which]], axis=1)

    return Source(dict.fromkeys(names, shape), assemble)


def fused_qkv(prefix: str, cut: Partition, suffix: str) -> Source:
    """Weight [hidden, kv_heads, group + 2, head_dim], or bias without the first axis, from q, k and v.

    Where the mesh has more KV heads than the checkpoint, each of the checkpoint's stands several times.
    """
    model, whole, dim = cut.model, cut.whole, cut.model.head_dim
    copies = whole.num_kv_heads // model.num_kv_heads
    q_name, *kv_names = (f"{prefix}.{part}_proj.{suffix}" for part in "qkv")
    columns = (model.hidden_size,) if suffix == "weight" else ()
    shapes = dict.fromkeys(kv_names, (model.num_kv_heads * dim, *columns))
    shapes[q_name] = (model.num_heads * dim, *columns)

    def assemble(read: ReadTensor, index: Index) -> np.ndarray:
        *embed, heads, _, _ = index

        def read_heads(name: str, start: int, stop: int) -> np.ndarray:
            tensor = read(name, (slice(start * dim, stop * dim), *embed))
            return tensor.reshape(stop - start, dim, *tensor.shape[1:])

        queries = read_heads(q_name, heads.start * whole.group_size, heads.stop * whole.group_size)
        first, last = heads.start // copies, (heads.stop - 1) // copies
        own = np.arange(heads.start, heads.stop) // copies - first
        keys_values = (read_heads(name, first, last + 1)[own, None] for name in kv_names)
        queries = queries.reshape(heads.stop - heads.start, whole.group_size, *queries.shape[1:])
        joined = np.concatenate([queries, *keys_values], axis=1)
        return np.moveaxis(joined, 3, 0) if suffix == "weight" else joined

    return Source(shapes, assemble)


def attention_output(name: str, config: ModelConfig) -> Source:
    """[kv_heads, group, head_dim, hidden] from [hidden, heads * head_dim]."""
    dim, group = config.head_dim, config.group_size
    shape = (config.hidden_size, config.num_heads * dim)

    def assemble(read: ReadTensor, index: Index) -> np.ndarray:
        heads, _, _, embed = index
        columns = slice(heads.start * group * dim, heads.stop * group * dim)
        return read(name, (embed, columns)).T.reshape(heads.stop - heads.start, group, dim, -1)

    return Source({name: shape}, assemble)


def dense_sources(cut: Partition) -> Sources:
    """All parameters of a `DenseModel`, by the names that Llama's descendants share."""
    config, hidden = cut.model, cut.model.hidden_size
    sources: Sources = {
        ("embed", "weight"): padded("model.embed_tokens.weight", config.vocab_size, hidden),
        ("norm", "weight"): direct("model.norm.weight", hidden),
    }
    if not config.tie_word_embeddings:
        sources["head", "weight"] = padded("lm_head.weight", config.vocab_size, hidden)
    for number in range(config.num_layers):
        layer, name = ("layers", number), f"model.layers.{number}"
        attention = f"{name}.self_attn"
        sources[*layer, "input_norm", "weight"] = direct(f"{name}.input_layernorm.weight", hidden)
        sources[*layer, "mlp_norm", "weight"] = direct(f"{name}.post_attention_layernorm.weight", hidden)
        sources[*layer, "attention", "qkv", "weight"] = fused_qkv(attention, cut, "weight")
        if config.has_qkv_bias:
            sources[*layer, "attention", "qkv", "bias"] = fused_qkv(attention, cut, "bias")
        if config.has_qk_norm:
            for part in ("q", "k"):
                source = direct(f"{attention}.{part}_norm.weight", config.head_dim)
                sources[*layer, "attention", f"{part}_norm", "weight"] = source
        sources[*layer, "attention", "out", "weight"] = attention_output(f"{attention}.o_proj.weight", cut.whole)
        sources[*layer, "mlp", "gate_up"] = fused_gate_up(f"{name}.mlp", config)
        down = transposed(f"{name}.mlp.down_proj.weight", hidden, config.intermediate_size)
        sources[*layer, "mlp", "down"] = down
    return sources
