"""From logits to tokens: one pipeline of transforms, stateless noise, log-probabilities."""

from jaxinfer.sampling.sampler import raw_logprobs, sample_cut, sample_full, sample_plain

__all__ = ["raw_logprobs", "sample_cut", "sample_full", "sample_plain"]
