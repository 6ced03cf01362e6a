"""The specification of `kv_update`: a scatter. With donated caches it happens in place on CPU and GPU."""

from __future__ import annotations

import jax


def kv_update(
    k_cache: jax.Array, v_cache: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `api.kv_update`."""
    block_size = k_cache.shape[2]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    k_cache = k_cache.at[blocks, :, offsets].set(k.astype(k_cache.dtype))
    v_cache = v_cache.at[blocks, :, offsets].set(v.astype(v_cache.dtype))
    return k_cache, v_cache
