"""Paged attention for Hopper GPUs: a decode kernel, a prefill kernel, and what they need planned once a step.

    plan(seq_lens, query_start_loc, ...)      a few small XLA operations, once a step for each kind of layer
        |                    |
    decode rows          prefill rows         every layer: one launch each; the second writes into the output
    mosaic_gpu_decode    mosaic_gpu_prefill   of the first, so a mixed batch costs no copy

Decode rows are the leading rows with exactly one query token; row s of them is token s.
"""

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

import jax

from jaxinfer.kernels.lowering import ask_ptxas_once
from jaxinfer.kernels.paged_attention.mosaic_gpu_decode import check_decode_supported, decode_attention
from jaxinfer.kernels.paged_attention.mosaic_gpu_decode_plan import DecodeParams, DecodePlan, plan_decode
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill import (
    PrefillParams,
    PrefillPlan,
    check_prefill_supported,
    plan_prefill,
    prefill_attention,
)

ask_ptxas_once()

DEFAULT_DEVICE = "NVIDIA H200"
HEAD_DIMS = (64, 80, 96, 112, 128, 192, 256)  # of both kernels


@dataclasses.dataclass(frozen=True)
class Params:
    """Tuning of both kernels for one head_dim."""

    decode: DecodeParams
    prefill: PrefillParams


@functools.partial(jax.tree_util.register_dataclass, data_fields=["decode", "prefill"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Plan:
    """The work lists of one step; `prefill` is None if no row has more than one query token."""

    decode: DecodePlan
    prefill: PrefillPlan | None


def tuned_params(head_dim: int, *, is_fp8: bool = False, device_kind: str | None = None) -> Params:
    """Tuned parameters from `tuned/`; those of an H200 for a device without a file, defaults where that has none.

    Args:
      is_fp8: the cache is fp8; without parameters of its own it has those of bf16.
      device_kind: such as "NVIDIA H200"; by default that of the first GPU, or an H200 where there is none.
    """
    if device_kind is None:
        device_kind = jax.devices()[0].device_kind if jax.default_backend() == "gpu" else DEFAULT_DEVICE
    return _tuned_params(head_dim, is_fp8, device_kind)


@functools.cache
def _tuned_params(head_dim: int, is_fp8: bool, device_kind: str) -> Params:
    folder = pathlib.Path(__file__).parent / "tuned"
    path = folder / f"{device_kind.lower().replace(' ', '_')}.json"
    if not path.exists():
        path = folder / f"{DEFAULT_DEVICE.lower().replace(' ', '_')}.json"
    tuned = json.loads(path.read_text())
    entry = tuned.get(str(head_dim), {})
    if is_fp8:
        entry = entry | tuned.get(f"{head_dim} fp8", {})
    return Params(DecodeParams(**entry.get("decode", {})), PrefillParams(**entry.get("prefill", {})))


def plan(
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None = None,
    max_query_len: int | None = None,
    is_fp8: bool = False,
    params: Params | None = None,
) -> Plan:
    """The work lists of a step, for every layer with these heads and this window.

    Args:
      seq_lens: int32 [S].
      query_start_loc: int32 [S + 1].
      num_tokens: T, the length of the padded batch.
      num_heads, num_kv_heads, head_dim, window: of the layers.
      max_query_len: a bound on a row's query tokens; 1 promises decode rows alone, which saves a launch a layer.
      is_fp8: the caches are fp8.
      params: tuning; by default that of the head_dim on an H200.
    """
    params = params or tuned_params(head_dim, is_fp8=is_fp8)
    prefill = None
    if max_query_len != 1:
        prefill = plan_prefill(
            seq_lens,
            query_start_loc,
            num_tokens=num_tokens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            window=window,
            params=params.prefill,
        )
    decode = plan_decode(seq_lens, query_start_loc, num_kv_heads=num_kv_heads, window=window, params=params.decode)
    return Plan(decode, prefill)


def check_supported(
    q: jax.Array,
    k_cache: jax.Array,
    *,
    scale: float = 1.0,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    params: Params | None = None,
    is_decode: bool = False,
) -> None:
    """Raise NotImplementedError, with the values, for what the kernels cannot do.

    Args:
      is_decode: only the decode kernel will run.
    """
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    if not (scale > 0 and math.isfinite(scale)):
        raise NotImplementedError(f"scale {scale}")
    params = params or tuned_params(head_dim, is_fp8=k_cache.dtype != q.dtype)
    layer = {"group": num_heads // num_kv_heads, "head_dim": head_dim, "block_size": block_size}
    check_decode_supported(q.dtype, k_cache.dtype, **layer, params=params.decode)
    if not is_decode:
        has_scales = k_scale is not None or v_scale is not None
        check_prefill_supported(q.dtype, k_cache.dtype, **layer, has_scales=has_scales, params=params.prefill)


def paged_attention(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    step_plan: Plan | None = None,
) -> jax.Array:
    """See `api.paged_attention`. `step_plan` is what `plan` made of this step for layers of this `window`."""
    num_tokens, num_heads, head_dim = q.shape
    if step_plan is None:
        check_supported(q, k_cache, scale=scale, k_scale=k_scale, v_scale=v_scale)
        step_plan = plan(
            seq_lens,
            query_start_loc,
            num_tokens=num_tokens,
            num_heads=num_heads,
            num_kv_heads=k_cache.shape[1],
            head_dim=head_dim,
            window=window,
            is_fp8=k_cache.dtype != q.dtype,
        )
    else:
        check_supported(q, k_cache, scale=scale, k_scale=k_scale, v_scale=v_scale, is_decode=step_plan.prefill is None)
    if step_plan.decode.window != window:
        raise ValueError(f"a plan for window {step_plan.decode.window} in a layer of window {window}")
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "sinks": sinks}
    scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}
    out = decode_attention(q, k_cache, v_cache, block_tables, step_plan.decode, **options, **scales)
    if step_plan.prefill is None:
        return out
    return prefill_attention(q, k_cache, v_cache, block_tables, step_plan.prefill, out, **options, **scales)
