"""From logits to tokens: one pipeline of transforms, stateless noise, log-probabilities."""

from jaxinfer.sampling.sampler import sample_full, sample_plain

__all__ = ["sample_full", "sample_plain"]
