"""Llama 2, 3 and 3.1, and models with their architecture such as SmolLM2."""

from __future__ import annotations

from jaxinfer.config import ModelConfig
from jaxinfer.models.hf_config import ConfigReader, read_dense

ARCHITECTURE = "LlamaForCausalLM"


def parse_config(reader: ConfigReader) -> ModelConfig:
    """Llama has neither biases nor QK-norm: `attention_bias` and `mlp_bias` are refused when true."""
    return read_dense(reader, ARCHITECTURE)
