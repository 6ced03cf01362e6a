"""Where the parameters of a `DenseModel` come from in a checkpoint with Hugging Face names.

Every source reads only what the asked-for index needs, so a device's shard costs a shard's bytes.
"""

from __future__ import annotations

import numpy as np

from jaxinfer.config import ModelConfig
from jaxinfer.loaders import Index, ReadTensor, Source

type Sources = dict[tuple[str | int, ...], Source]
"""Path of a parameter in the model -> its source."""


def direct(name: str, *shape: int) -> Source:
    """A parameter that is one tensor as it stands."""
    return Source({name: shape}, lambda read, index: read(name, index))


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


def fused_qkv(prefix: str, config: ModelConfig, suffix: str) -> Source:
    """Weight [hidden, kv_heads, group + 2, head_dim], or bias without the first axis, from q, k and v."""
    dim = config.head_dim
    groups = {"q": config.group_size, "k": 1, "v": 1}
    names = {part: f"{prefix}.{part}_proj.{suffix}" for part in groups}
    columns = (config.hidden_size,) if suffix == "weight" else ()
    shapes = {names[part]: (config.num_kv_heads * group * dim, *columns) for part, group in groups.items()}

    def assemble(read: ReadTensor, index: Index) -> np.ndarray:
        *embed, heads, _, _ = index
        parts = []
        for part, group in groups.items():
            rows = slice(heads.start * group * dim, heads.stop * group * dim)
            tensor = read(names[part], (rows, *embed))
            parts.append(tensor.reshape(heads.stop - heads.start, group, dim, *tensor.shape[1:]))
        joined = np.concatenate(parts, axis=1)
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


def dense_sources(config: ModelConfig) -> Sources:
    """All parameters of a `DenseModel`, by the names that Llama's descendants share."""
    hidden = config.hidden_size
    sources: Sources = {
        ("embed", "weight"): direct("model.embed_tokens.weight", config.vocab_size, hidden),
        ("norm", "weight"): direct("model.norm.weight", hidden),
    }
    if not config.tie_word_embeddings:
        sources["head", "weight"] = direct("lm_head.weight", config.vocab_size, hidden)
    for number in range(config.num_layers):
        layer, name = ("layers", number), f"model.layers.{number}"
        attention = f"{name}.self_attn"
        sources[*layer, "input_norm", "weight"] = direct(f"{name}.input_layernorm.weight", hidden)
        sources[*layer, "mlp_norm", "weight"] = direct(f"{name}.post_attention_layernorm.weight", hidden)
        sources[*layer, "attention", "qkv", "weight"] = fused_qkv(attention, config, "weight")
        if config.has_qkv_bias:
            sources[*layer, "attention", "qkv", "bias"] = fused_qkv(attention, config, "bias")
        if config.has_qk_norm:
            for part in ("q", "k"):
                source = direct(f"{attention}.{part}_norm.weight", config.head_dim)
                sources[*layer, "attention", f"{part}_norm", "weight"] = source
        sources[*layer, "attention", "out", "weight"] = attention_output(f"{attention}.o_proj.weight", config)
        sources[*layer, "mlp", "gate_up"] = fused_gate_up(f"{name}.mlp", config)
        down = transposed(f"{name}.mlp.down_proj.weight", hidden, config.intermediate_size)
        sources[*layer, "mlp", "down"] = down
    return sources
