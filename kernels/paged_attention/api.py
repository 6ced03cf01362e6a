"""`paged_attention`: validates, then dispatches."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.kernels.paged_attention import reference

IMPLEMENTATIONS = ("mosaic_gpu", "mosaic_tpu", "reference")
FP8 = jnp.float8_e4m3fn


def choose(
    platform: str,
    *,
    compute_capability: str,
    dtype: jnp.dtype,
    cache_dtype: jnp.dtype | None = None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    table_shape: tuple[int, int] = (1, 1),
) -> str:
    """The fastest implementation for layers of this kind: Hopper's or the TPU's where it can, else the reference.

    Args:
      platform: "cpu", "gpu" or "tpu".
      compute_capability: of the GPU, such as "9.0".
      dtype: of q.
      cache_dtype: of the cache; None is q's.
      table_shape: rows and columns of the block tables at most.
    """
    q = jax.ShapeDtypeStruct((1, num_heads, head_dim), dtype)
    page = jax.ShapeDtypeStruct((1, num_kv_heads, block_size, head_dim), cache_dtype or dtype)
    try:
        if platform == "gpu" and compute_capability == "9.0":
            from jaxinfer.kernels.paged_attention import mosaic_gpu

            mosaic_gpu.check_supported(q, page)  # pyright: ignore[reportArgumentType]
            return "mosaic_gpu"
        if platform == "tpu":
            from jaxinfer.kernels.paged_attention import mosaic_tpu

            tables = jax.ShapeDtypeStruct(table_shape, jnp.int32)
            mosaic_tpu.check_supported(q, page, block_tables=tables)  # pyright: ignore[reportArgumentType]
            return "mosaic_tpu"
    except NotImplementedError:
        pass
    return "reference"


def plan(
    implementation: str,
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cache_dtype: jnp.dtype | None = None,
    is_decode: bool = False,
) -> Any:
    """What an implementation works out once a step for all layers, to be passed as `step_plan`; None for the reference.

    Args:
      num_tokens: T.
      cache_dtype: of the cache; None is q's.
      is_decode: every row has exactly one token, or none.
    """
    options: dict[str, Any] = {"num_tokens": num_tokens, "num_heads": num_heads, "head_dim": head_dim}
    options["max_query_len"] = 1 if is_decode else None
    if implementation == "mosaic_gpu":
        from jaxinfer.kernels.paged_attention import mosaic_gpu

        if cache_dtype == FP8:
            options["is_fp8"] = True
        return mosaic_gpu.plan(seq_lens, query_start_loc, num_kv_heads=num_kv_heads, **options)
    if implementation == "mosaic_tpu":
        from jaxinfer.kernels.paged_attention import mosaic_tpu

        return mosaic_tpu.plan(seq_lens, query_start_loc, **options)
    return None


@partial(jax.jit, static_argnames=("scale", "window", "softcap", "implementation"))
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
    implementation: str = "reference",
    step_plan: Any = None,
) -> jax.Array:
    """Causal attention of a packed, mixed batch. The drawing shows a row whose 3 new tokens follow 4 cached ones:

        keys      0 1 2 3 | 4 5 6        seq_lens[s] = 7, query_start_loc[s+1] - query_start_loc[s] = 3
        query 0   x x x x   x . .        query i sits at position seq_lens[s] - 3 + i
        query 1   x x x x   x x .        and sees the keys at positions 0 .. its own
        query 2   x x x x   x x x

    Args:
      q: [T, heads, head_dim]; query head h reads KV head h // (heads // kv_heads).
      k_cache: [num_blocks, kv_heads, block_size, head_dim], this step's K already written; `v_cache` alike.
      block_tables: int32 [S, M]: block_tables[s, j] holds positions j * block_size .. of row s.
      seq_lens: int32 [S]: tokens of the row, this step's included; 0 for padding rows.
      query_start_loc: int32 [S + 1]: row s has queries query_start_loc[s] .. query_start_loc[s + 1].
      scale: multiplies the scores.
      window: a query sees `window` keys at most, its own included.
      softcap: scores become softcap * tanh(score / softcap).
      sinks: [heads]: a logit per head that takes part in the softmax and has no value.
      k_scale: float32 scalar that multiplies a quantised K; `v_scale` alike.
      implementation: one of `IMPLEMENTATIONS`.
      step_plan: what `plan` made of this step, or None.

    Returns:
      [T, heads, head_dim] in q's dtype; zeros for padding tokens.

    Raises:
      ValueError: shapes that do not fit together.
      NotImplementedError: the implementation cannot do this case.
    """
    _num_tokens, heads, head_dim = q.shape
    if k_cache.shape != v_cache.shape or k_cache.shape[3] != head_dim or heads % k_cache.shape[1]:
        raise ValueError(f"q {q.shape} does not fit caches {k_cache.shape}, {v_cache.shape}")
    num_rows = block_tables.shape[0]
    if seq_lens.shape != (num_rows,) or query_start_loc.shape != (num_rows + 1,):
        raise ValueError(
            f"block_tables has {num_rows} rows, seq_lens {seq_lens.shape}, query_start_loc {query_start_loc.shape}"
        )
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    options |= {"k_scale": k_scale, "v_scale": v_scale}
    arguments = (q, k_cache, v_cache, block_tables, seq_lens, query_start_loc)
    if implementation == "mosaic_gpu":
        from jaxinfer.kernels.paged_attention import mosaic_gpu

        return mosaic_gpu.paged_attention(*arguments, **options, step_plan=step_plan)
    if implementation == "mosaic_tpu":
        from jaxinfer.kernels.paged_attention import mosaic_tpu

        return mosaic_tpu.paged_attention(*arguments, **options, step_plan=step_plan)
    if implementation == "reference":
        return reference.paged_attention(*arguments, **options)
    raise NotImplementedError(f"paged_attention has no implementation {implementation!r}")
