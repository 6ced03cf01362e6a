"""Paged KV cache bookkeeping on the host: which block belongs to whom, and which prefixes can be reused."""

from jaxinfer.cache.block_pool import BlockPool
from jaxinfer.cache.manager import KVCacheManager, PrefixHit
from jaxinfer.cache.prefix_index import PrefixIndex

__all__ = ["BlockPool", "KVCacheManager", "PrefixHit", "PrefixIndex"]
