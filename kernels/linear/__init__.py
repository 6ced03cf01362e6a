"""Products of a few rows with a weight, and what stands before and after them in a decoder layer."""

from jaxinfer.kernels.linear.api import choose, linear

__all__ = ["choose", "linear"]
