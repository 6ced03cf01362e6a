"""Writes new K and V rows into their cache slots, alone or with what precedes it: QK-norm and rotation."""

from jaxinfer.kernels.kv_update.api import check_rope, choose, kv_update, plan, rope_kv_update
from jaxinfer.kernels.kv_update.reference import rotate

__all__ = ["check_rope", "choose", "kv_update", "plan", "rope_kv_update", "rotate"]
