"""From float32 logits to tokens: temperature, min-p, top-k, top-p and the draw."""

from jaxinfer.kernels.sampling.api import choose, sample, sample_slots
from jaxinfer.kernels.sampling.reference import Slots
from jaxinfer.kernels.sampling.sharded import sample as sample_sharded

__all__ = ["Slots", "choose", "sample", "sample_sharded", "sample_slots"]
