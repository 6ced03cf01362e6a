"""Products of a few rows with a weight, and what stands before and after them in a decoder layer."""

from jaxinfer.kernels.linear.api import linear

__all__ = ["linear"]
