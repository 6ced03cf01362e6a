"""Attention of packed rows over a paged KV cache."""

from jaxinfer.kernels.paged_attention.api import choose, paged_attention, plan

__all__ = ["choose", "paged_attention", "plan"]
