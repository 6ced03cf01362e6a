"""Paged decode attention for Hopper: what it supports, and its launch.

The plan is in `mosaic_gpu_decode_plan.py`, the kernel in `mosaic_gpu_decode_kernel.py`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.paged_attention.mosaic_gpu_common import LOG2E, TILE_ROWS, pad_rows
from jaxinfer.kernels.paged_attention.mosaic_gpu_decode_kernel import decode_kernel, product_rows
from jaxinfer.kernels.paged_attention.mosaic_gpu_decode_plan import DecodeParams, DecodePlan

MIN_GROUP = 8  # smallest wgmma N
MAX_GROUP = 32
MAX_FP8_GROUP = {256: 16}  # by head_dim, where registers do not suffice for more
MAX_SMEM = 227 * 1024  # of a CTA
SMEM_RESERVE = 3 * 1024  # barriers and the scratch of reductions
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)


def check_decode_supported(
    q_dtype: Any, cache_dtype: Any, *, group: int, head_dim: int, block_size: int, params: DecodeParams
) -> None:
    """Raise NotImplementedError, with the values, for what the decode kernel cannot do."""
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim {head_dim} is not one of {HEAD_DIMS}")
    if q_dtype not in (jnp.bfloat16, jnp.float16) or cache_dtype not in (q_dtype, jnp.float8_e4m3fn):
        raise NotImplementedError(
            f"q {q_dtype} with a cache of {cache_dtype}: q must be bf16 or f16, the cache the same or fp8 e4m3"
        )
    if group > MAX_GROUP:
        raise NotImplementedError(f"{group} query heads a KV head: more than {MAX_GROUP}")
    if cache_dtype == jnp.float8_e4m3fn and group > MAX_FP8_GROUP.get(head_dim, MAX_GROUP):
        raise NotImplementedError(f"{group} query heads a KV head of {head_dim} with an fp8 cache")
    if block_size % 16 or max(params.block_kv, block_size) % min(params.block_kv, block_size):
        raise NotImplementedError(f"block_size {block_size} with tiles of {params.block_kv} tokens")


def fitting_stages(params: DecodeParams, *, head_dim: int, padded_group: int, itemsize: int) -> int:
    """`params.num_stages`, or as many as shared memory has room for beside a large group."""
    tile, queries = params.block_kv * head_dim, padded_group * head_dim * 2
    widened = 2 * tile * 2 if itemsize == 1 else 0
    fixed = widened + 5 * queries + padded_group * params.block_kv * 2 + SMEM_RESERVE
    return max(2, min(params.num_stages, (MAX_SMEM - fixed) // (2 * tile * itemsize)))


def decode_attention(
    q: jax.Array,  # [T, H, D]
    k_cache: jax.Array,  # [N, KVH, BS, D]
    v_cache: jax.Array,  # [N, KVH, BS, D]
    block_tables: jax.Array,  # [S, M] int32
    plan: DecodePlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [H]
    k_scale: jax.Array | None = None,  # float32 scalar
    v_scale: jax.Array | None = None,
) -> jax.Array:
    """Attention of the batch's decode rows [T, H, D]; tokens past the batch are 0, other rows' undefined."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = plan.num_kv_heads
    group = num_heads // num_kv_heads
    padded_group = pl.cdiv(group, MIN_GROUP) * MIN_GROUP
    itemsize = k_cache.dtype.itemsize
    stages = fitting_stages(plan.params, head_dim=head_dim, padded_group=padded_group, itemsize=itemsize)
    params = dataclasses.replace(plan.params, num_stages=stages)

    q = pad_rows(q.reshape(-1, head_dim), multiple=TILE_ROWS)
    operands = [q, k_cache, v_cache, block_tables, plan.row_info, plan.cta_work]
    operands += [plan.num_tokens, plan.arrivals]
    has_scales = k_scale is not None or v_scale is not None
    if has_scales:
        operands += [jnp.asarray(1 if x is None else x, jnp.float32).reshape(1) for x in (k_scale, v_scale)]
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, group) * LOG2E
        operands.append(jnp.pad(sinks, ((0, 0), (0, padded_group - group))))
    rows = sum(count for _, count in product_rows(head_dim))
    kernel = plgpu.kernel(
        functools.partial(
            decode_kernel,
            group=group,
            scale=scale,
            window=plan.window,
            softcap=softcap,
            has_scales=has_scales,
            has_sinks=sinks is not None,
            params=params,
        ),
        out_type=(
            jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct((params.num_ctas, rows, padded_group), jnp.float32),
            jax.ShapeDtypeStruct((params.num_ctas, padded_group), jnp.float32),
            jax.ShapeDtypeStruct((params.num_ctas, padded_group), jnp.float32),
        ),
        grid=(params.num_ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="wg",
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,  # the kernel's docstring says why that is safe
        ),
    )
    return kernel(*operands)[0]
