"""Qwen 2 and 2.5, dense: Llama with a bias on queries, keys and values."""

from __future__ import annotations

from jaxinfer.config import ModelConfig
from jaxinfer.models.hf_config import ConfigReader, ignore_unused_window, read_dense

ARCHITECTURE = "Qwen2ForCausalLM"


def parse_config(reader: ConfigReader) -> ModelConfig:
    """The bias has no key of its own: the architecture implies it."""
    ignore_unused_window(reader)
    return read_dense(reader, ARCHITECTURE, has_qkv_bias=True)
