"""`kv_update` and `rope_kv_update` for Hopper: one launch, a thread block a token, nothing but registers.

    qkv[t]    [kv_heads, group + 2, head_dim]  -+- q   norm -> rotate -> q_out[t]
    slots[t]  -> block, offset                  +- k   norm -> rotate -> k_cache[block, :, offset]
    cos[t], sin[t]                              +- v   ---------------> v_cache[block, :, offset]

All loads of a token are issued before anything waits for one, so a block takes about one trip to memory, whatever its
size; no shared memory, no barrier, no copy engine, so it begins at once. The halves of a head that rotation pairs are
two arrays with the same layout: a thread holds components i and i + head_dim / 2 of a head, and rotates them alone.

`_layout` deals an array of heads to the 128 threads: `lanes` neighbours share a row, each taking `vector` elements at
a time, and rows go to the lanes and warps that are left. What cannot be divided is held twice.

The bound is bytes: each row in and out once.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.lowering import ask_ptxas_once

ask_ptxas_once()

WARPS, LANES = 4, 32
VECTOR_BYTES = 16
FP8 = jnp.float8_e4m3fn
FP8_MAX = 448.0
ROW_DTYPES = (jnp.bfloat16, jnp.float16)
MAX_ELEMENTS = 96
"""Elements a thread holds; a token with more is cut at its KV heads."""


def check_supported(qkv: jax.Array, k_cache: jax.Array) -> None:
    """Raise NotImplementedError, with the values, for what the kernels cannot do.

    Args:
      qkv: anything with the rows' dtype and with head_dim as its last dimension.
    """
    head_dim = qkv.shape[-1]
    if qkv.dtype not in ROW_DTYPES or k_cache.dtype not in (qkv.dtype, FP8):
        raise NotImplementedError(f"rows of {qkv.dtype} into a cache of {k_cache.dtype}: bf16 or f16, or fp8 e4m3")
    if head_dim % 16 or head_dim > 256:
        raise NotImplementedError(f"head_dim {head_dim} is no multiple of 16 up to 256")


def kv_update(
    k_cache: jax.Array,
    v_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `api.kv_update`. Rows for slot 0 are dropped."""
    check_supported(k, k_cache)
    scales = _scales(k_scale, v_scale)
    k_ref, v_ref = jax.new_ref(k_cache), jax.new_ref(v_cache)
    body = functools.partial(_copy_kernel, has_scales=bool(scales))
    _kernel(body, "kv_update", k.shape[0], 1)(k, v, slot_mapping, *scales, k_ref, v_ref)
    return jax.freeze(k_ref), jax.freeze(v_ref)


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
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `api.rope_kv_update`. Rows for slot 0 are dropped."""
    check_supported(qkv, k_cache)
    num_tokens, kv_heads, rows, head_dim = qkv.shape
    parts = _parts(kv_heads, rows * head_dim)
    scales = _scales(k_scale, v_scale)
    norms = () if q_norm is None or k_norm is None else (q_norm, k_norm)
    k_ref, v_ref = jax.new_ref(k_cache), jax.new_ref(v_cache)
    q_type = jax.ShapeDtypeStruct((num_tokens, kv_heads, rows - 2, head_dim), qkv.dtype)
    body = functools.partial(
        _rope_kernel, eps=eps, heads=kv_heads // parts, has_norm=bool(norms), has_scales=bool(scales)
    )
    kernel = _kernel(body, "rope_kv_update", num_tokens, parts, out_type=q_type)
    q = kernel(qkv, cos, sin, slot_mapping, *norms, *scales, k_ref, v_ref)
    return q.reshape(num_tokens, -1, head_dim), jax.freeze(k_ref), jax.freeze(v_ref)


def _kernel(body: Any, name: str, num_tokens: int, parts: int, out_type: Any = ()) -> Any:
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=(parts, num_tokens),  # the last one may be the largest
        grid_names=("part", "token"),
        kernel_name=name,
        # No memory is both read and written, so nothing has to wait for a barrier.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )


def _scales(k_scale: jax.Array | None, v_scale: jax.Array | None) -> tuple[jax.Array, ...]:
    """Nothing, or both as float32 [1]."""
    if k_scale is None and v_scale is None:
        return ()
    return tuple(
        jnp.ones((1,), jnp.float32) if scale is None else jnp.asarray(scale, jnp.float32).reshape(1)
        for scale in (k_scale, v_scale)
    )


def _parts(kv_heads: int, elements: int) -> int:
    """Blocks that share a token: as few as hold its `elements` a KV head in registers."""
    return next(
        parts
        for parts in range(1, kv_heads + 1)
        if kv_heads % parts == 0 and (kv_heads // parts * elements <= MAX_ELEMENTS * WARPS * LANES or parts == kv_heads)
    )


def _power_of_2(value: int) -> int:
    """The largest power of 2 that divides `value`."""
    return value & -value


def _layout(shape: tuple[int, ...], itemsize: int) -> Any:
    """How threads hold [..., heads, columns] of elements of `itemsize` bytes."""
    *rows, columns = shape
    free = [_power_of_2(size) for size in rows]

    def lanes_for(vector: int) -> int:
        return min(LANES, _power_of_2(columns // vector))

    vectors = [v for v in (1, 2, 4, 8) if v * itemsize <= VECTOR_BYTES and columns % v == 0]
    num_rows = functools.reduce(lambda a, b: a * b, free, 1)
    full = [v for v in vectors if lanes_for(v) * num_rows >= WARPS * LANES]
    vector = max(full) if full else max(vectors, key=lambda v: (lanes_for(v), v))
    lanes = lanes_for(vector)

    def deal(count: int) -> tuple[list[int], int]:
        """Rows of each dimension for `count` lanes or warps, and how often they are held."""
        taken = [1] * len(rows)
        for axis in reversed(range(len(rows))):
            taken[axis] = min(count, free[axis])
            free[axis] //= taken[axis]
            count //= taken[axis]
        return taken, count

    lane_rows, lane_copies = deal(LANES // lanes)
    warp_rows, warp_copies = deal(WARPS)
    rank = len(shape)
    tiling = fa.Tiling(
        (
            (*(a * b for a, b in zip(warp_rows, lane_rows, strict=True)), lanes * vector),
            (*lane_rows, lanes * vector),
            (*(1 for _ in rows), vector),
        )
    )
    warps = tuple(range(-3 * rank, -2 * rank - 1))
    within = tuple(range(-2 * rank, -rank))
    tiled = fa.TiledLayout(
        tiling,
        (*([fa.Replicated(warp_copies)] if warp_copies > 1 else []), *warps),
        (*([fa.Replicated(lane_copies)] if lane_copies > 1 else []), *within),
        -1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(tiled.tiling, tiled.warp_dims, tiled.lane_dims, tiled.vector_dim)


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Loads, arithmetic and stores of arrays [..., columns] in one layout."""

    shape: tuple[int, ...]
    layout: Any

    def load(self, ref: Any) -> jax.Array:
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def load_columns(self, ref: Any) -> jax.Array:
        """[columns] -> float32, the same for all heads."""
        axes = tuple(range(len(self.shape) - 1))
        values = plgpu.load(ref, layout=self.layout.reduce(axes), optimized=False).astype(jnp.float32)
        return self._spread(values, (len(self.shape) - 1,))

    def _spread(self, values: jax.Array, axes: tuple[int, ...]) -> jax.Array:
        return plgpu.layout_cast(lax.broadcast_in_dim(values, self.shape, axes), self.layout)

    def normalise(self, low: jax.Array, high: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
        """float32 halves over the root of their common mean square."""
        axis = len(self.shape) - 1
        squares = jnp.sum(low * low + high * high, axis=axis)
        scale = lax.rsqrt(squares / (2 * self.shape[-1]) + eps)
        scale = self._spread(scale, tuple(range(axis)))
        return low * scale, high * scale


def _halves(columns: int) -> tuple[Any, Any]:
    return pl.ds(0, columns), pl.ds(columns, columns)


def _to_cache(x: jax.Array, dtype: Any, scale: Any) -> jax.Array:
    """Rows as the cache holds them; `scale` is a reference or None."""
    if scale is None and dtype != FP8:
        return x
    x = x.astype(jnp.float32)
    x = x if scale is None else x / scale[0]
    return (jnp.minimum(jnp.maximum(x, -FP8_MAX), FP8_MAX) if dtype == FP8 else x).astype(dtype)


def _optional(refs: list[Any], is_there: bool) -> tuple[Any, Any]:
    """The next two references, or nothing twice."""
    return (refs.pop(0), refs.pop(0)) if is_there else (None, None)


def _in_slot(slot: jax.Array, block_size: int, write: Callable[[jax.Array, jax.Array], None]) -> None:
    """`write` at the block and offset of a slot, unless it is the null block's first."""
    pl.when(slot > 0)(lambda: write(lax.div(slot, block_size), lax.rem(slot, block_size)))


def _rope_kernel(
    qkv,  # [T, kv_heads, group + 2, head_dim]
    cos,  # float32 [T, head_dim / 2]
    sin,
    slots,  # int32 [T]
    *refs,  # norms [head_dim] of q and k, scales [1] of k and v, where there are any; caches; q
    eps: float,
    heads: int,
    has_norm: bool,
    has_scales: bool,
) -> None:
    *optional, k_cache, v_cache, q_out = refs
    q_norm, k_norm = _optional(optional, has_norm)
    k_scale, v_scale = _optional(optional, has_scales)
    _, kv_heads, rows, head_dim = qkv.shape
    group, columns, itemsize = rows - 2, head_dim // 2, jnp.dtype(qkv.dtype).itemsize
    token = lax.axis_index("token")
    part = pl.ds(lax.axis_index("part") * heads, heads) if heads < kv_heads else slice(None)
    halves = _halves(columns)

    def of(shape: tuple[int, ...]) -> _Heads:
        return _Heads(shape, _layout(shape, itemsize))

    q_heads, k_heads, v_heads = of((heads, group, columns)), of((heads, columns)), of((heads, head_dim))
    slot = slots[token]
    q = [q_heads.load(qkv.at[token, part, pl.ds(0, group), half]) for half in halves]
    k = [k_heads.load(qkv.at[token, part, group, half]) for half in halves]
    v = v_heads.load(qkv.at[token, part, group + 1])
    q_angles, k_angles = ([these.load_columns(x.at[token]) for x in (cos, sin)] for these in (q_heads, k_heads))
    q_weights, k_weights = (
        None if norm is None else [these.load_columns(norm.at[half]) for half in halves]
        for norm, these in ((q_norm, q_heads), (k_norm, k_heads))
    )

    def rounded(x: jax.Array) -> jax.Array:
        return x.astype(qkv.dtype).astype(jnp.float32)

    def rotated(x: list[jax.Array], these: _Heads, weights: Any, angles: Any) -> tuple[jax.Array, jax.Array]:
        low, high = (half.astype(jnp.float32) for half in x)
        if weights is not None:  # what a separate norm stores is rounded twice
            low, high = these.normalise(low, high, eps)
            low, high = (rounded(rounded(half) * w) for half, w in zip((low, high), weights, strict=True))
        c, s = angles
        return (low * c - high * s).astype(qkv.dtype), (high * c + low * s).astype(qkv.dtype)

    k = rotated(k, k_heads, k_weights, k_angles)
    for half, where in zip(rotated(q, q_heads, q_weights, q_angles), halves, strict=True):
        q_out[token, part, :, where] = half

    def write(block: jax.Array, offset: jax.Array) -> None:
        for half, where in zip(k, halves, strict=True):
            k_cache[block, part, offset, where] = _to_cache(half, k_cache.dtype, k_scale)
        v_cache[block, part, offset] = _to_cache(v, v_cache.dtype, v_scale)

    _in_slot(slot, k_cache.shape[2], write)


def _copy_kernel(
    k,  # [T, kv_heads, head_dim]
    v,
    slots,  # int32 [T]
    *refs,  # scales [1] of k and v, where there are any; caches
    has_scales: bool,
) -> None:
    *optional, k_cache, v_cache = refs
    k_scale, v_scale = _optional(optional, has_scales)
    heads = _Heads(k.shape[1:], _layout(k.shape[1:], jnp.dtype(k.dtype).itemsize))
    token = lax.axis_index("token")
    rows = heads.load(k.at[token]), heads.load(v.at[token])
    # Behind the barrier, or rows would be loaded only when their slot is known. Not the rows themselves: the barrier
    # of jax 0.11.2 returns arrays of 16 bits with several registers in another order.
    slot = lax.optimization_barrier(slots[token])

    def write(block: jax.Array, offset: jax.Array) -> None:
        for x, cache, scale in zip(rows, (k_cache, v_cache), (k_scale, v_scale), strict=True):
            cache[block, :, offset] = _to_cache(x, cache.dtype, scale)

    _in_slot(slot, k_cache.shape[2], write)
