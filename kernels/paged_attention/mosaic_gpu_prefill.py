"""Paged prefill attention for Hopper: many query tokens a row, causal, over cached and new keys alike.

One CTA an SM works through items: a tile of query tokens of one row for query heads that share a KV head, so that
all consumers of the item read the same K and V tiles and need the same number of them.

    producer     item: Q K0 V0 K1 V1 K2 V2 ..., then the next item without a pause     (`mosaic_gpu_prefill_load`)
    consumer 0   S1 = Q K1', O += P0 V0 |           | S2 = Q K2', O += P1 V1 | ...      (`mosaic_gpu_prefill_attend`)
                          | softmax 1 |                         | softmax 2 |
    consumer 1            | S1 = Q K1', O += P0 V0  |           | S2 = ...

With `cluster` = 2, two CTAs share an item, its heads or tokens, and each of its K and V tiles is read once for both.
Which items there are, and in which order, says `mosaic_gpu_prefill_plan`.

A TMA copy into swizzled memory cannot begin inside a swizzle tile of 8 rows, and drops what it would have to shift.
Query tiles therefore begin at multiples of 8 tokens of the packed batch, and the first tile of a row may hold up to
7 tokens of the row before it, which are computed in vain and not stored.

The bound is the matrix units: 4 * head_dim * (query, key) pairs under the mask, over their rate.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.paged_attention.mosaic_gpu_common import LOG2E, TILE_ROWS, pad_rows
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_attend import attend_items
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_items import ItemList
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_load import load_items
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_memory import Layer, Memory, scratch
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_plan import (
    CONSUMERS,
    ROWS,
    PrefillParams,
    PrefillPlan,
    plan_prefill,
)

__all__ = ["PrefillParams", "PrefillPlan", "check_prefill_supported", "plan_prefill", "prefill_attention"]

HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)
REGISTERS = 504  # of a thread of the producer and one of each consumer: what 384 threads are launched with
F16_MAX = 65504.0


def check_prefill_supported(
    q_dtype: Any,
    cache_dtype: Any,
    *,
    group: int,
    head_dim: int,
    block_size: int,
    has_scales: bool,
    params: PrefillParams,
) -> None:
    """Raise NotImplementedError, with the values, for what the prefill kernel cannot do."""
    del group, has_scales  # any group; scales of any cache
    if head_dim not in HEAD_DIMS:
        raise NotImplementedError(f"head_dim {head_dim} is not one of {HEAD_DIMS}")
    if q_dtype not in (jnp.bfloat16, jnp.float16) or cache_dtype not in (q_dtype, jnp.float8_e4m3fn):
        raise NotImplementedError(
            f"q {q_dtype} with a cache of {cache_dtype}: q must be bf16 or f16, the cache the same or fp8 e4m3"
        )
    if block_size % 16 or max(params.block_kv, block_size) % min(params.block_kv, block_size):
        raise NotImplementedError(f"block_size {block_size} with tiles of {params.block_kv} tokens")


def _prefill_kernel(
    q_ref,  # [T, H, D]
    k_ref,  # [N, KVH, BS, D]
    v_ref,  # [N, KVH, BS, D]
    block_tables_ref,  # [S, M]
    tiles_ref,  # [max_tiles, 6]
    sections_ref,  # [max_tiles, 3]
    num_tiles_ref,  # [2]
    *refs,  # sinks [H] and scales [2] where there are any; then out [T, H, D]
    layer: Layer,
    has_sinks: bool,
    has_scales: bool,
):
    refs = list(refs)
    sinks_ref = refs.pop(0) if has_sinks else None
    scales_ref = refs.pop(0) if has_scales else None
    (out_ref,) = refs
    items = ItemList(tiles_ref, sections_ref, num_tiles_ref, layer.num_heads, layer.group, layer.window, layer.params)
    memory_types = scratch(layer, q_ref.dtype, out_ref.dtype, k_ref.dtype)

    @functools.partial(pl.run_scoped, **memory_types, collective_axes="wg")
    def _scope(**refs):
        memory = Memory(**refs | {"qo": tuple(refs["qo"])})

        @pl.when(lax.axis_index("wg") == CONSUMERS)
        def _producer():
            plgpu.set_max_registers(layer.params.producer_registers, action="decrease")
            load_items(q_ref, k_ref, v_ref, block_tables_ref, items, layer, memory)

        @pl.when(lax.axis_index("wg") < CONSUMERS)
        def _consumer():
            plgpu.set_max_registers((REGISTERS - layer.params.producer_registers) // CONSUMERS, action="increase")
            attend_items(out_ref, sinks_ref, scales_ref, layer, memory)


def prefill_attention(
    q: jax.Array,  # [T, H, D]
    k_cache: jax.Array,  # [N, KVH, BS, D]
    v_cache: jax.Array,  # [N, KVH, BS, D]
    block_tables: jax.Array,  # [S, M] int32
    plan: PrefillPlan,
    out: jax.Array | None = None,  # [T, H, D]
    *,
    scale: float,
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [H]
    k_scale: jax.Array | None = None,  # float32 scalar
    v_scale: jax.Array | None = None,
) -> jax.Array:
    """Attention of the batch's prefill rows. Other tokens keep what `out` holds (undefined without it)."""
    num_tokens, num_heads, head_dim = q.shape
    out_dtype, is_fp8 = q.dtype, k_cache.dtype != q.dtype
    if is_fp8:
        q = jnp.clip(q, -F16_MAX, F16_MAX).astype(jnp.float16)
    q = pad_rows(q, multiple=TILE_ROWS, minimum=ROWS)
    operands = [q, k_cache, v_cache, block_tables, plan.tiles, plan.sections, plan.num_tiles]
    if sinks is not None:
        operands.append(sinks.astype(jnp.float32) * LOG2E)
    has_scales = k_scale is not None or v_scale is not None
    if has_scales:
        scales = (jnp.ones((), jnp.float32) if x is None else jnp.asarray(x, jnp.float32) for x in (k_scale, v_scale))
        operands.append(jnp.stack(list(scales)))
    layer = Layer(
        num_heads=num_heads,
        group=plan.group,
        head_dim=head_dim,
        block_size=k_cache.shape[2],
        scale=scale,
        window=plan.window,
        softcap=softcap,
        is_fp8=is_fp8,
        params=plan.params,
    )
    ctas = plan.params.ctas
    kernel = functools.partial(
        plgpu.kernel,
        functools.partial(_prefill_kernel, layer=layer, has_sinks=sinks is not None, has_scales=has_scales),
        grid=(max(plan.params.num_sms // ctas, 1),),
        grid_names=("cta",),
        **({} if ctas == 1 else {"cluster": (ctas,), "cluster_names": ("rank",)}),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        kernel_name="paged_prefill",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # reductions stay inside groups of four threads
        ),
    )
    if out is None:
        result = kernel(out_type=jax.ShapeDtypeStruct(q.shape, out_dtype))(*operands)
    else:
        out_ref = jax.new_ref(pad_rows(out, multiple=TILE_ROWS, minimum=ROWS))
        kernel(out_type=())(*operands, out_ref)
        result = jax.freeze(out_ref)
    return result[:num_tokens]
