"""Qwen3, dense: Llama with an RMSNorm on every query and key head, and a head_dim of its own."""

from __future__ import annotations

from jaxinfer.config import ModelConfig
from jaxinfer.models.hf_config import ConfigReader, read_dense

ARCHITECTURE = "Qwen3ForCausalLM"


def parse_config(reader: ConfigReader) -> ModelConfig:
    """`max_window_layers` and `sliding_window` mean nothing while `use_sliding_window` is false."""
    if not reader.get("use_sliding_window", False):
        reader.allow("sliding_window")
        layer_types = reader.get("layer_types", ())
        if any(kind != "full_attention" for kind in layer_types):
            raise ValueError(
                f"config.json has layer_types {sorted(set(layer_types))}; only full_attention is supported"
            )
    reader.get("head_dim", 128)
    return read_dense(reader, ARCHITECTURE, has_qk_norm=True)
