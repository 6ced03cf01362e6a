"""Products of up to 256 rows with a weight, and what stands before and after them in a decoder layer."""

from jaxinfer.kernels.linear.api import choose, choose_for, linear, qkv_rope_kv_update

__all__ = ["choose", "choose_for", "linear", "qkv_rope_kv_update"]
