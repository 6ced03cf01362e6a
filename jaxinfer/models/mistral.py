"""Mistral without a sliding window (7B v0.2 and later, Nemo): Llama with a head_dim that may be its own."""

from __future__ import annotations

from jaxinfer.config import ModelConfig
from jaxinfer.models.hf_config import ConfigReader, read_dense

ARCHITECTURE = "MistralForCausalLM"


def parse_config(reader: ConfigReader) -> ModelConfig:
    """A `sliding_window` is refused by `read_dense`."""
    return read_dense(reader, ARCHITECTURE)
