"""Writes new K and V rows into their cache slots."""

from jaxinfer.kernels.kv_update.api import kv_update

__all__ = ["kv_update"]
