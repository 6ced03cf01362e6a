"""`kv_update`: validates, then dispatches."""

from __future__ import annotations

from functools import partial

import jax

from jaxinfer.kernels.kv_update import reference


@partial(jax.jit, static_argnames=("implementation",))
def kv_update(
    k_cache: jax.Array,
    v_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    implementation: str = "reference",
) -> tuple[jax.Array, jax.Array]:
    """Writes row t of `k` and `v` into slot `slot_mapping[t]` of the caches.

    Args:
      k_cache: [num_blocks, kv_heads, block_size, head_dim]; `v_cache` alike.
      k: [T, kv_heads, head_dim]; `v` alike.
      slot_mapping: int32 [T]: block * block_size + offset. Padding rows name slot 0, in the null block.
      implementation: "reference" is the one there is.

    Returns:
      Both caches; the same buffers where the caller donates them.

    Raises:
      ValueError: shapes that do not fit together.
    """
    _, kv_heads, _, head_dim = k_cache.shape
    if k.shape != v.shape or k.shape[1:] != (kv_heads, head_dim) or v_cache.shape != k_cache.shape:
        raise ValueError(f"k {k.shape}, v {v.shape} do not fit caches {k_cache.shape}, {v_cache.shape}")
    if slot_mapping.shape != k.shape[:1]:
        raise ValueError(f"slot_mapping {slot_mapping.shape} does not match the {k.shape[0]} rows of k")
    if implementation != "reference":
        raise NotImplementedError(f"kv_update has no implementation {implementation!r}")
    return reference.kv_update(k_cache, v_cache, k, v, slot_mapping)
