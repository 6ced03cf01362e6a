"""The sum over the devices of a mesh axis, for messages of decode size; alone, or with the residual and the norm."""

from jaxinfer.kernels.all_reduce.api import all_reduce, all_reduce_norm, choose
from jaxinfer.kernels.all_reduce.channel import Channel, connect, is_reachable

__all__ = ["Channel", "all_reduce", "all_reduce_norm", "choose", "connect", "is_reachable"]
