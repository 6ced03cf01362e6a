"""Dimensions of public models, by the names that benchmarks use."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxinfer.metrics.roofline import ModelShape

_QWEN3 = partial(ModelShape, head_dim=128, vocab_size=151_936)

SHAPES = {
    "0.6b": _QWEN3(
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        intermediate_size=3072,
        tie_word_embeddings=True,
    ),
    "8b": _QWEN3(hidden_size=4096, num_layers=36, num_heads=32, num_kv_heads=8, intermediate_size=12_288),
    "30b-a3b": _QWEN3(
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        intermediate_size=768,
        num_experts=128,
        num_experts_per_token=8,
    ),
}
"""Qwen3-0.6B, Qwen3-8B and Qwen3-30B-A3B."""


def hf_config(name: str) -> dict[str, Any]:
    """A `config.json` of the shape, as Hugging Face has it for the model.

    Raises:
      ValueError: no shape of that name.
    """
    if name not in SHAPES:
        raise ValueError(f"config {name!r} is not known; known are {', '.join(SHAPES)}")
    shape = SHAPES[name]
    config: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if shape.num_experts else "Qwen3ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": shape.tie_word_embeddings,
        "max_position_embeddings": 40_960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151_645,
    }
    if shape.num_experts:
        config |= {
            "intermediate_size": 6144,
            "moe_intermediate_size": shape.intermediate_size,
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.num_experts_per_token,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return config
