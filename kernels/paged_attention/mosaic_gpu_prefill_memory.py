"""What the parts of the prefill kernel share: the layer's constants, and shared memory with its barriers."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.paged_attention.mosaic_gpu_common import swizzled_smem
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_items import NUM_FIELDS
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_plan import CONSUMERS, ROWS, PrefillParams


@dataclasses.dataclass(frozen=True)
class Layer:
    """What is known when the kernel is built. `is_fp8`: the cache is, and q is f16."""

    num_heads: int
    group: int
    head_dim: int
    block_size: int
    scale: float
    window: int | None
    softcap: float | None
    is_fp8: bool
    params: PrefillParams

    @property
    def copy_tokens(self) -> int:
        """Tokens of a TMA copy of keys or values."""
        return min(self.block_size, self.params.block_kv)

    @property
    def num_copies(self) -> int:
        return self.params.block_kv // self.copy_tokens

    @property
    def per_item(self) -> int:
        return self.params.heads_per_item(self.group)


@dataclasses.dataclass(frozen=True)
class Memory:
    """References to shared memory. K and V have a ring of stages each; an item has one of the q_buffers.

    qo        queries of an item [q_buffers, CONSUMERS, ROWS, D], later its output in their place: swizzled, in q's and
              in the output's type, and plain
    record    of an item, for the consumers; behind them the two places of claims
    k, v      [num_stages, block_kv, D]
    raw_k, v  fp8 tiles before they are converted
    v_ready   of the stages, and of a tile with unused slots, which the producer has to clean first
    pin       what `Products.await_output` stores
    p         probabilities, only in the interpreter
    """

    qo: Any
    record: Any
    k: Any
    v: Any
    raw_k: Any
    raw_v: Any
    pin: Any
    p: Any
    q_ready: Any
    k_ready: Any
    v_ready: Any
    raw_ready: Any
    q_free: Any
    k_free: Any
    v_free: Any
    turn: Any
    claimed: Any


def scratch(layer: Layer, q_dtype: Any, out_dtype: Any, cache_dtype: Any) -> dict[str, Any]:
    """The types of `Memory`'s fields, by name."""
    params, head_dim = layer.params, layer.head_dim
    stages, q_buffers, block_kv = params.num_stages, params.q_buffers, params.block_kv
    qo_shape, kv_shape = (q_buffers, CONSUMERS, ROWS, head_dim), (stages, block_kv, head_dim)
    raw = plgpu.SMEM(kv_shape[1:], cache_dtype) if layer.is_fp8 else None
    kv_ready = functools.partial(plgpu.Barrier, num_arrivals=1 if layer.is_fp8 else layer.num_copies)
    kv_free = functools.partial(plgpu.Barrier, num_arrivals=CONSUMERS, num_barriers=stages)
    if params.ctas > 1:
        kv_free = functools.partial(
            plgpu.ClusterBarrier, collective_axes=("rank",), num_arrivals=CONSUMERS, num_barriers=stages
        )
    return {
        "qo": _queries_and_output(qo_shape, q_dtype, out_dtype, is_interpreted=params.is_interpreted),
        "record": plgpu.SMEM((q_buffers + 2, NUM_FIELDS), jnp.int32),
        "k": swizzled_smem(kv_shape, q_dtype),
        "v": swizzled_smem(kv_shape, q_dtype),
        "raw_k": raw,
        "raw_v": raw,
        "pin": None if params.is_interpreted else plgpu.SMEM((CONSUMERS, 128), jnp.float32),
        "p": swizzled_smem((CONSUMERS, ROWS, block_kv), q_dtype, like=head_dim) if params.is_interpreted else None,
        "q_ready": plgpu.Barrier(num_arrivals=CONSUMERS + 1, num_barriers=q_buffers),
        "k_ready": kv_ready(num_barriers=stages),
        "v_ready": kv_ready(num_barriers=stages + 1),
        "raw_ready": plgpu.Barrier(num_arrivals=layer.num_copies, num_barriers=2) if layer.is_fp8 else None,
        "q_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=q_buffers),
        "k_free": kv_free(),
        "v_free": kv_free(),
        "turn": plgpu.Barrier(num_barriers=CONSUMERS),
        "claimed": plgpu.ClusterBarrier(collective_axes=("rank",), num_barriers=2) if params.ctas > 1 else None,
    }


def _queries_and_output(shape: tuple[int, ...], q_dtype: Any, out_dtype: Any, *, is_interpreted: bool) -> Any:
    """(queries, output swizzled, output plain) in one memory.

    The interpreter takes any two accesses to a union for a conflict, and knows no swizzling: there it is one array, or
    two of two types.
    """
    queries, output = swizzled_smem(shape, q_dtype), swizzled_smem(shape, out_dtype)
    if is_interpreted:
        return (queries,) if q_dtype == out_dtype else (queries, output)
    plain = plgpu.SMEM(shape, out_dtype)
    return plgpu.RefUnion(queries, plain) if q_dtype == out_dtype else plgpu.RefUnion(queries, output, plain)
