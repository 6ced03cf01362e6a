"""Projection to q, k and v with all that lies between it and attention, in one launch, for Hopper.

    norm(x) @ W        [T, K] x [K, kv_heads, group + 2, head_dim]: a cluster computes one head of all rows
    a CTA of it        then holds whole heads of some rows
      q, k             QK-norm -> rotation           halves of a head, which rotation pairs, are two arrays
      q                -> q_out[t, head]
      k, v             -> cache[block, head, offset] one copy a row

The product is that of `mosaic_gpu_cluster`. The bound is the weight's bytes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.linear import mosaic_gpu_cluster
from jaxinfer.kernels.linear.mosaic_gpu_common import out_layout, spread
from jaxinfer.kernels.linear.tuning import ATOM, MAX_SMEM, Params, Product


def check_supported(x: jax.Array, weight: jax.Array, k_cache: jax.Array, params: Params, *, has_norm: bool) -> Product:
    """The product, or NotImplementedError, with the values, for what the kernel cannot do."""
    (num_rows, size), head_dim = x.shape, weight.shape[-1]
    product = Product(num_rows, size, 1, weight.size // size, has_norm)
    if head_dim != params.block_n:
        raise NotImplementedError(f"heads of {head_dim} with {params}")
    if x.dtype not in (jnp.bfloat16, jnp.float16) or not x.dtype == weight.dtype == k_cache.dtype:
        raise NotImplementedError(f"x {x.dtype}, weight {weight.dtype}, cache {k_cache.dtype}: all bf16 or all f16")
    params.check(product)
    needed = params.smem_bytes(product) + num_rows // params.splits * head_dim * 2
    if needed > MAX_SMEM:
        raise NotImplementedError(f"{product} and its output need {needed} bytes of shared memory with {params}")
    return product


def _kernel(
    x_ref,  # [T, K]
    w_ref,  # [K, 1, kv_heads * (group + 2) * head_dim]
    cos_ref,  # float32 [T, head_dim / 2]
    sin_ref,
    slots_ref,  # int32 [T]
    *refs,  # input norm [K / 64, 64], bias [heads, head_dim], q_norm, k_norm [head_dim] if there are any; caches; q
    eps: float,
    group: int,
    has_norm: bool,
    has_bias: bool,
    has_head_norms: bool,
    params: Params,
):
    *optional, k_cache, v_cache, q_ref, part_ref, square_ref = refs
    norm_ref = optional.pop(0) if has_norm else None
    bias_ref = optional.pop(0) if has_bias else None
    head_norms = optional if has_head_norms else None
    dtype = x_ref.dtype
    head_dim = params.block_n
    half = head_dim // 2
    owned = x_ref.shape[0] // params.splits
    shape, layout = (owned, half), out_layout(owned, half, whole_rows=True)
    halves = pl.ds(0, half), pl.ds(half, half)

    def rounded(x):
        return x.astype(dtype).astype(jnp.float32)

    def fetch(ref, axes=None):
        if axes is None:
            return plgpu.load(ref, layout=layout, optimized=False)
        values = plgpu.load(ref, layout=layout.reduce(0), optimized=False).astype(jnp.float32)
        return spread(values, shape, 1, layout)

    def finish(rows, column, out_smem):
        block = lax.div(column, head_dim)
        head, kind = lax.div(block, group + 2), lax.rem(block, group + 2)
        is_value = kind == group + 1
        cos, sin = fetch(cos_ref.at[rows]), fetch(sin_ref.at[rows])
        biases = None if bias_ref is None else [fetch(bias_ref.at[block, x], 0) for x in halves]
        weights = None
        if head_norms is not None:
            q_weights, k_weights = ([fetch(ref.at[x], 0) for x in halves] for ref in head_norms)
            weights = [jnp.where(kind < group, q, k) for q, k in zip(q_weights, k_weights, strict=True)]
        slots = [slots_ref[rows.start + i] for i in range(owned)]

        def rotated(low, high):
            if weights is not None:  # what a separate norm stores is rounded twice
                squares = jnp.sum(low * low + high * high, axis=1)
                scale = spread(lax.rsqrt(squares / head_dim + eps), shape, 0, layout)
                low, high = (rounded(rounded(x * scale) * w) for x, w in zip((low, high), weights, strict=True))
            return low * cos - high * sin, high * cos + low * sin

        def write(read):
            low, high = (read(0, x, layout) for x in halves)
            low, high = rounded(low), rounded(high)
            if biases is not None:
                low, high = rounded(low + biases[0]), rounded(high + biases[1])
            for x, raw, turned in zip(halves, (low, high), rotated(low, high), strict=True):
                out_smem.at[:, x][...] = jnp.where(is_value, raw, turned).astype(dtype)
            plgpu.commit_smem()

            @pl.when(kind < group)
            def _():
                plgpu.copy_smem_to_gmem(out_smem, q_ref.at[rows, head * group + kind])

            for i, slot in enumerate(slots):
                block_size = k_cache.shape[2]
                page, offset = lax.div(slot, block_size), lax.rem(slot, block_size)

                @pl.when((slot > 0) & (kind == group))
                def _(i=i, page=page, offset=offset):
                    plgpu.copy_smem_to_gmem(out_smem.at[i], k_cache.at[page, head, offset])

                @pl.when((slot > 0) & is_value)
                def _(i=i, page=page, offset=offset):
                    plgpu.copy_smem_to_gmem(out_smem.at[i], v_cache.at[page, head, offset])

            plgpu.wait_smem_to_gmem(0)

        return write

    scratch = plgpu.SMEM((owned, head_dim), dtype)
    mosaic_gpu_cluster.multiply(
        x_ref, w_ref, norm_ref, (part_ref, square_ref), finish, eps=eps, params=params, scratch=scratch
    )


def qkv_rope_kv_update(
    x: jax.Array,  # [T, K]
    weight: jax.Array,  # [K, kv_heads, group + 2, head_dim]
    k_cache: jax.Array,
    v_cache: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slot_mapping: jax.Array,
    *,
    norm_weight: jax.Array | None,
    eps: float,
    bias: jax.Array | None,
    q_norm: jax.Array | None,
    k_norm: jax.Array | None,
    params: Params,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.qkv_rope_kv_update`."""
    num_rows, size = x.shape
    _, kv_heads, rows, head_dim = weight.shape
    product = check_supported(x, weight, k_cache, params, has_norm=norm_weight is not None)
    optional: list[Any] = [] if norm_weight is None else [norm_weight.reshape(-1, ATOM)]
    optional += [] if bias is None else [bias.reshape(-1, head_dim)]
    optional += [] if q_norm is None else [q_norm, k_norm]
    k_ref, v_ref = jax.new_ref(k_cache), jax.new_ref(v_cache)
    body = functools.partial(
        _kernel,
        eps=eps,
        group=rows - 2,
        has_norm=norm_weight is not None,
        has_bias=bias is not None,
        has_head_norms=q_norm is not None,
        params=params,
    )
    q = jax.ShapeDtypeStruct((num_rows, kv_heads * (rows - 2), head_dim), x.dtype)
    operands = (x, weight.reshape(size, 1, -1), cos, sin, slot_mapping, *optional)
    out, *_ = mosaic_gpu_cluster.kernel(body, "qkv_rope_kv_update", product, params, q)(*operands, k_ref, v_ref)
    return out, jax.freeze(k_ref), jax.freeze(v_ref)
