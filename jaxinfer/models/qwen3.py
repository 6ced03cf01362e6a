"""Qwen3, dense: Llama with an RMSNorm on every query and key head, and a head_dim of its own."""

from __future__ import annotations

from jaxinfer.config import ModelConfig
from jaxinfer.models.hf_config import ConfigReader, ignore_unused_window, read_dense

ARCHITECTURE = "Qwen3ForCausalLM"


def parse_config(reader: ConfigReader) -> ModelConfig:
    """`head_dim` is 128 where the file does not say: it is not hidden_size / heads."""
    ignore_unused_window(reader)
    return read_dense(reader, ARCHITECTURE, has_qk_norm=True, head_dim=int(reader.get("head_dim", 128)))
