"""`kv_update` and `rope_kv_update`: validate, then dispatch."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.kernels.kv_update import reference

IMPLEMENTATIONS = ("mosaic_gpu", "mosaic_tpu", "reference")


def choose(
    platform: str,
    *,
    compute_capability: str,
    dtype: jnp.dtype,
    cache_dtype: jnp.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    num_tokens: int,
) -> str:
    """The fastest implementation for layers of this kind: Hopper's or the TPU's where it can, else the reference.

    Args:
      platform: "cpu", "gpu" or "tpu".
      compute_capability: of the GPU, such as "9.0".
      dtype: of q, k and v.
      num_tokens: T at most.
    """
    rows = jax.ShapeDtypeStruct((num_tokens, num_kv_heads, head_dim), dtype)
    page = jax.ShapeDtypeStruct((1, num_kv_heads, block_size, head_dim), cache_dtype)
    try:
        if platform == "gpu" and compute_capability == "9.0":
            from jaxinfer.kernels.kv_update import mosaic_gpu

            mosaic_gpu.check_supported(rows, page)  # pyright: ignore[reportArgumentType]
            return "mosaic_gpu"
        if platform == "tpu":
            from jaxinfer.kernels.kv_update import mosaic_tpu

            mosaic_tpu.check_supported(page, rows)  # pyright: ignore[reportArgumentType]
            return "mosaic_tpu"
    except NotImplementedError:
        pass
    return "reference"


def plan(implementation: str, slot_mapping: jax.Array) -> Any:
    """What an implementation works out once a step for all layers, to be passed as `step_plan`, or None.

    Args:
      slot_mapping: int32 [T].
    """
    if implementation != "mosaic_tpu":
        return None
    from jaxinfer.kernels.kv_update import mosaic_tpu

    return mosaic_tpu.plan(slot_mapping)


@partial(jax.jit, static_argnames=("implementation",))
def kv_update(
    k_cache: jax.Array,
    v_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    implementation: str = "reference",
    step_plan: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes row t of `k` and `v` into slot `slot_mapping[t]` of the caches.

    Args:
      k_cache: [num_blocks, kv_heads, block_size, head_dim]; `v_cache` alike.
      k: [T, kv_heads, head_dim]; `v` alike.
      slot_mapping: int32 [T]: block * block_size + offset. Padding rows name slot 0, in the null block, which then
        holds one of them or what it held.
      k_scale: float32 scalar by which K is divided before it is stored; `v_scale` alike. A float8 cache saturates.
      implementation: one of `IMPLEMENTATIONS`.
      step_plan: what `plan` made of this step, or None.

    Returns:
      Both caches; the same buffers where the caller donates them.

    Raises:
      ValueError: shapes that do not fit together.
      NotImplementedError: the implementation cannot do this case.
    """
    _check_caches(k_cache, v_cache, slot_mapping, k.shape)
    if k.shape != v.shape:
        raise ValueError(f"k {k.shape} and v {v.shape} differ")
    arguments = (k_cache, v_cache, k, v, slot_mapping)
    scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    if implementation == "mosaic_gpu":
        from jaxinfer.kernels.kv_update import mosaic_gpu

        return mosaic_gpu.kv_update(*arguments, **scales)
    if implementation == "mosaic_tpu":
        from jaxinfer.kernels.kv_update import mosaic_tpu

        return mosaic_tpu.kv_update(*arguments, **scales, step_plan=step_plan)
    if implementation == "reference":
        return reference.kv_update(*arguments, **scales)
    raise NotImplementedError(f"kv_update has no implementation {implementation!r}")


@partial(jax.jit, static_argnames=("eps", "implementation"))
def rope_kv_update(
    qkv: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slot_mapping: jax.Array,
    *,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    eps: float = 1e-6,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    implementation: str = "reference",
    step_plan: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """All that lies between the fused projection and attention: QK-norm, rotation of q and k, the write of k and v.

    Args:
      qkv: [T, kv_heads, group + 2, head_dim]: a KV head's `group` query heads, its k and its v.
      k_cache: [num_blocks, kv_heads, block_size, head_dim]; `v_cache` alike.
      cos: float32 [T, head_dim / 2], of the angles by which components i and i + head_dim / 2 turn; `sin` alike.
      slot_mapping: int32 [T], as for `kv_update`.
      q_norm: [head_dim]: weights of the RMS norm of every query head; `k_norm` alike. Both or none.
      eps: of the norms.
      k_scale, v_scale, implementation, step_plan: as for `kv_update`.

    Returns:
      q [T, kv_heads * group, head_dim] in qkv's dtype, normalised and rotated, and both caches.

    Raises:
      ValueError: shapes that do not fit together.
      NotImplementedError: the implementation cannot do this case.
    """
    check_rope(qkv.shape, k_cache, v_cache, cos, sin, slot_mapping, q_norm, k_norm)
    scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    if implementation == "mosaic_gpu":
        from jaxinfer.kernels.kv_update import mosaic_gpu

        arguments = (qkv, k_cache, v_cache, cos, sin, slot_mapping)
        return mosaic_gpu.rope_kv_update(*arguments, q_norm=q_norm, k_norm=k_norm, eps=eps, **scales)
    q, k, v = reference.rope(qkv, cos, sin, q_norm=q_norm, k_norm=k_norm, eps=eps)
    updated = kv_update(
        *(k_cache, v_cache, k, v, slot_mapping), **scales, implementation=implementation, step_plan=step_plan
    )
    return q, *updated


def check_rope(
    qkv: tuple[int, ...],
    k_cache: jax.Array,
    v_cache: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slot_mapping: jax.Array,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
) -> None:
    """Raises ValueError, with the shapes, for arguments of `rope_kv_update` that do not fit qkv of this shape."""
    num_tokens, kv_heads, rows, head_dim = qkv
    _check_caches(k_cache, v_cache, slot_mapping, (num_tokens, kv_heads, head_dim))
    if rows < 3 or cos.shape != (num_tokens, head_dim // 2) or sin.shape != cos.shape:
        raise ValueError(f"qkv {qkv} does not fit cos {cos.shape}, sin {sin.shape}")
    for norm in (q_norm, k_norm):
        if (norm is None) != (q_norm is None) or (norm is not None and norm.shape != (head_dim,)):
            raise ValueError(f"q_norm and k_norm must both be [{head_dim}] or both be None")


def _check_caches(k_cache: jax.Array, v_cache: jax.Array, slot_mapping: jax.Array, rows: tuple[int, ...]) -> None:
    _, kv_heads, _, head_dim = k_cache.shape
    if rows[1:] != (kv_heads, head_dim) or v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype:
        caches = f"{k_cache.dtype}{k_cache.shape}, {v_cache.dtype}{v_cache.shape}"
        raise ValueError(f"rows {rows} do not fit caches {caches}")
    if slot_mapping.shape != rows[:1]:
        raise ValueError(f"slot_mapping {slot_mapping.shape} does not match {rows[0]} rows")
