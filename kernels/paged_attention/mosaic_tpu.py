"""Paged attention for TPUs: one kernel (`mosaic_tpu_kernel`), launched for decode rows and for the rest, and its plan.

    plan(seq_lens, query_start_loc, ...)      query tiles; a few small XLA operations, once a step
        |                    |
    decode tiles         prefill tiles        every layer: a launch each
    1 token of a row     `query_tile` tokens

A tile is some query tokens of one row, with all their heads. The kernel walks the tiles, and for each the row's keys,
a chunk of pages at a time, with the online softmax of Milakov and Gimelshein (arXiv 1805.02867) in float32. Pages of
the next chunk, also of the next tile's first, are copied from HBM while this chunk is multiplied.

Queries are laid out [kv_heads, tokens * group, head_dim], so that a tile is one matrix a KV head. Registers have 8
sublanes, and copies begin at multiples of them: decode pads the group, while prefill tiles begin at tokens that are
multiples of `ALIGN` and overlap where rows meet:

    tokens     0 1 2 3 4 5 6 7 8 9 ...         rows a and b, tiles of 8 tokens, ALIGN 4
    rows       a a a a a a b b b b b b
    tile of a  x x x x x x . .                 merges x into what the output holds
    tile of b          . . x x x x x x
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.paged_attention import mosaic_tpu_kernel as kernels
from jaxinfer.kernels.paged_attention.mosaic_tpu_kernel import LANES, STAGES, SUBLANES

ALIGN = 16  # tokens
KEY_CHUNK = 128  # keys multiplied at a time, or one page if that is larger
ACC_BYTES = 1 << 20  # bounds a prefill tile
VMEM_BYTES = 32 << 20
SMEM_BYTES = 768 << 10  # of block tables; a TPU has 1 MiB
DTYPES = (jnp.bfloat16, jnp.float32)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["items", "count"], meta_fields=["tokens"])
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Query tiles. Tokens low .. high of a tile are its row's; the rest belongs to other rows, or to none."""

    items: jax.Array  # int32 [bound * FIELDS]
    count: jax.Array  # int32 [1]
    tokens: int  # of a tile


@functools.partial(jax.tree_util.register_dataclass, data_fields=["decode", "prefill"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Plan:
    """The tiles of one step, for all layers; `prefill` is None if no row has more than one query token."""

    decode: Tiles
    prefill: Tiles | None


def query_tile(num_heads: int, head_dim: int) -> int:
    """Tokens of a prefill tile: 64, or fewer where many heads make its accumulator large."""
    tokens = 64
    while tokens > ALIGN and tokens * num_heads * head_dim * 4 > ACC_BYTES:
        tokens //= 2
    return tokens


def plan(
    seq_lens: jax.Array,
    query_start_loc: jax.Array,
    *,
    num_tokens: int,
    num_heads: int,
    head_dim: int,
    max_query_len: int | None = None,
) -> Plan:
    """The tiles of a step, for every layer with these heads.

    Args:
      seq_lens: int32 [S].
      query_start_loc: int32 [S + 1].
      num_tokens: T, the length of the padded batch.
      num_heads, head_dim: of the layers.
      max_query_len: a bound on a row's query tokens; 1 promises decode rows alone, which saves a launch a layer.
    """
    (num_rows,) = seq_lens.shape
    starts, num_queries = query_start_loc[:-1], query_start_loc[1:] - query_start_loc[:-1]
    num_decode = jnp.sum(jnp.cumprod(jnp.where(num_queries == 1, 1, 0)), dtype=jnp.int32)
    rows = jnp.arange(min(num_rows, num_tokens), dtype=jnp.int32)
    zeros = jnp.zeros_like(rows)
    fields = (rows, rows, zeros, zeros + 1, seq_lens[: len(rows)] - 1)
    decode = Tiles(jnp.stack(fields, axis=1).reshape(-1), num_decode[None], 1)
    if max_query_len == 1:
        return Plan(decode, None)

    tile = query_tile(num_heads, head_dim)
    is_prefill = (jnp.arange(num_rows, dtype=jnp.int32) >= num_decode) & (num_queries > 0)
    aligned = starts // ALIGN * ALIGN
    tiles = jnp.where(is_prefill, -(-(query_start_loc[1:] - aligned) // tile), 0)
    ends = jnp.cumsum(tiles)
    longest = min(num_rows, num_tokens)
    bound = (num_tokens + longest * (ALIGN - 1)) // tile + longest
    numbers = jnp.arange(bound, dtype=jnp.int32)
    row = jnp.searchsorted(ends, numbers, side="right", method="compare_all").astype(jnp.int32)
    row = jnp.minimum(row, num_rows - 1)
    token = aligned[row] + (numbers - (ends - tiles)[row]) * tile
    low = jnp.maximum(starts[row] - token, 0)
    high = jnp.minimum(query_start_loc[1:][row] - token, tile)
    position = (seq_lens - num_queries)[row] + token - starts[row]
    items = jnp.stack((row, token, low, high, position), axis=1).reshape(-1)
    return Plan(decode, Tiles(items, ends[-1:], tile))


def check_supported(
    q: jax.Array,
    k_cache: jax.Array,
    *,
    block_tables: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
) -> None:
    """Raise NotImplementedError, with the values, for what the kernel cannot do."""
    _, num_heads, head_dim = q.shape
    _, _, block_size, _ = k_cache.shape
    if q.dtype not in DTYPES or k_cache.dtype != q.dtype:
        raise NotImplementedError(f"q {q.dtype} with a cache of {k_cache.dtype}: both must be bf16 or both f32")
    if k_scale is not None or v_scale is not None:
        raise NotImplementedError("k_scale and v_scale")
    if head_dim % LANES:
        raise NotImplementedError(f"head_dim {head_dim} is no multiple of {LANES}")
    if block_size % 16:
        raise NotImplementedError(f"block_size {block_size} is no multiple of 16")
    needed = vmem_bytes(q, k_cache, tokens=query_tile(num_heads, head_dim))
    if needed > VMEM_BYTES * 3 // 4:
        raise NotImplementedError(f"q {q.shape} on pages of {k_cache.shape[1:]}: {needed} bytes of VMEM")
    if block_tables is not None and block_tables.size * 4 > SMEM_BYTES:
        raise NotImplementedError(f"block_tables {block_tables.shape} exceed {SMEM_BYTES} bytes of SMEM")


def vmem_bytes(q: jax.Array, k_cache: jax.Array, *, tokens: int) -> int:
    """What the kernel asks of VMEM for tiles of `tokens`, sinks included, temporaries not."""
    _, num_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    rows = num_heads * tokens
    queries = rows * head_dim * (3 * q.dtype.itemsize + 4) + 3 * rows * LANES * 4
    return queries + 2 * STAGES * kv_heads * keys_per_chunk(block_size) * head_dim * k_cache.dtype.itemsize


def keys_per_chunk(block_size: int) -> int:
    return block_size * max(1, KEY_CHUNK // block_size)


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
    interpret: pltpu.InterpretParams | bool = False,
) -> jax.Array:
    """See `api.paged_attention`.

    Args:
      step_plan: what `plan` made of this step, or None.
      interpret: how to run without a TPU, for tests.
    """
    check_supported(q, k_cache, block_tables=block_tables, k_scale=k_scale, v_scale=v_scale)
    num_tokens, num_heads, head_dim = q.shape
    if step_plan is None:
        step_plan = plan(seq_lens, query_start_loc, num_tokens=num_tokens, num_heads=num_heads, head_dim=head_dim)
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks}
    attend = functools.partial(_attend_tiles, **options, interpret=interpret)
    num_leading = min(num_tokens, seq_lens.shape[0])
    decoded = attend(q[:num_leading], k_cache, v_cache, block_tables, step_plan.decode)
    decoded = jnp.pad(decoded, ((0, num_tokens - num_leading), (0, 0), (0, 0)))
    if step_plan.prefill is None:
        return decoded
    prefilled = attend(q, k_cache, v_cache, block_tables, step_plan.prefill)
    is_decode = jnp.arange(num_tokens, dtype=jnp.int32) < step_plan.decode.count
    return jnp.where(is_decode[:, None, None], decoded, prefilled)


def _attend_tiles(
    q: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    block_tables: jax.Array,
    tiles: Tiles,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: jax.Array | None,
    interpret: pltpu.InterpretParams | bool,
) -> jax.Array:
    """One launch: [T, heads, head_dim], zeros where no tile is."""
    num_tokens, num_heads, head_dim = q.shape
    _, kv_heads, block_size, _ = k_cache.shape
    group = num_heads // kv_heads
    padded_group = -(-group // SUBLANES) * SUBLANES if tiles.tokens == 1 else group
    padded_tokens = num_tokens + tiles.tokens - 1  # a tile may begin at the last token
    padded_tokens = -(-padded_tokens // ALIGN) * ALIGN
    rows, keys = tiles.tokens * padded_group, keys_per_chunk(block_size)

    queries = q.reshape(num_tokens, kv_heads, group, head_dim).swapaxes(0, 1)
    padding = ((0, 0), (0, padded_tokens - num_tokens), (0, padded_group - group), (0, 0))
    queries = jnp.pad(queries, padding).reshape(kv_heads, -1, head_dim)
    in_hbm, in_vmem = pl.BlockSpec(memory_space=pltpu.HBM), pl.BlockSpec(memory_space=pltpu.VMEM)
    inputs, specs = [queries, k_cache, v_cache, jnp.zeros_like(queries)], [in_hbm] * 4
    if sinks is not None:
        logits = jnp.pad(sinks.astype(jnp.float32).reshape(kv_heads, 1, group), padding[:1] * 2 + padding[2:3])
        logits = jnp.broadcast_to(logits, (kv_heads, tiles.tokens, padded_group)).reshape(kv_heads, rows, 1)
        inputs, specs = [jnp.broadcast_to(logits, (kv_heads, rows, LANES)), *inputs], [in_vmem, *specs]

    kernel = functools.partial(
        kernels.attend if sinks is not None else kernels.attend_without_sinks,
        tokens=tiles.tokens,
        scale=scale,
        window=window,
        softcap=softcap,
        table_width=block_tables.shape[1],
    )
    out = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(1,),
            in_specs=specs,
            out_specs=in_hbm,
            scratch_shapes=[
                pltpu.VMEM((2, kv_heads, rows, head_dim), q.dtype),
                pltpu.VMEM((STAGES, kv_heads, keys, head_dim), k_cache.dtype),
                pltpu.VMEM((STAGES, kv_heads, keys, head_dim), v_cache.dtype),
                pltpu.VMEM((kv_heads, rows, head_dim), jnp.float32),
                pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, rows, head_dim), q.dtype),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA((2, STAGES)),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(queries.shape, q.dtype),
        input_output_aliases={2 + len(inputs): 0},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES),
        interpret=interpret,
        name="paged_decode" if tiles.tokens == 1 else "paged_prefill",
    )(tiles.items, tiles.count, block_tables.reshape(-1), *inputs)
    out = out.reshape(kv_heads, padded_tokens, padded_group, head_dim)[:, :num_tokens, :group]
    return out.swapaxes(0, 1).reshape(q.shape)
