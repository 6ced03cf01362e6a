"""From float32 logits to tokens: temperature, min-p, top-k, top-p and the draw."""

from jaxinfer.kernels.sampling.api import choose, sample

__all__ = ["choose", "sample"]
