"""What models are composed of. Parameters carry logical axes; shapes inside a step are a device's own."""

from jaxinfer.layers.attention import Attention, KVCache
from jaxinfer.layers.embedding import Embedding, compute_logits
from jaxinfer.layers.linear import AttentionOutput, QKVProjection
from jaxinfer.layers.mlp import GatedMLP
from jaxinfer.layers.norm import RMSNorm
from jaxinfer.layers.rotary import attention_factor, inverse_frequencies, rotary_angles
from jaxinfer.layers.stream import Stream, Sums

__all__ = [
    "Attention",
    "AttentionOutput",
    "Embedding",
    "GatedMLP",
    "KVCache",
    "QKVProjection",
    "RMSNorm",
    "Stream",
    "Sums",
    "attention_factor",
    "compute_logits",
    "inverse_frequencies",
    "rotary_angles",
]
