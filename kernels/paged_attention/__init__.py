"""Attention of packed rows over a paged KV cache."""

from jaxinfer.kernels.paged_attention.api import paged_attention

__all__ = ["paged_attention"]
