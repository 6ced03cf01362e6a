"""Paged attention for TPUs: one kernel, launched for decode rows and for the rest, and what it needs planned a step.

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
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

SUBLANES = 8
LANES = 128
ALIGN = 16  # tokens
KEY_CHUNK = 128  # keys multiplied at a time, or one page if that is larger
STAGES = 2
FIELDS = 5  # of a tile: row, first token, low, high, position of the first token
MASKED = -1e30  # finite: a query without keys in a chunk must not make NaN
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
        _kernel if sinks is not None else functools.partial(_without_sinks, _kernel),
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


def _without_sinks(kernel, items, count, tables, *refs, **options) -> None:
    kernel(items, count, tables, None, *refs, **options)


@dataclasses.dataclass
class _Tile:
    """A tile's scalars, on the scalar core."""

    row: jax.Array
    token: jax.Array
    low: jax.Array
    high: jax.Array
    position: jax.Array

    @property
    def num_keys(self) -> jax.Array:
        return self.position + self.high

    def first_key(self, window: int | None) -> jax.Array:
        return jnp.maximum(self.position + self.low + 1 - window, 0) if window else jnp.int32(0)


def _kernel(
    items,  # SMEM, see Tiles
    count,
    tables,  # SMEM int32 [S * table_width]
    sinks,  # VMEM float32 [kv_heads, rows, LANES] or None
    q,  # HBM [kv_heads, tokens * group, head_dim]
    k_cache,  # HBM [num_blocks, kv_heads, block_size, head_dim]
    v_cache,
    _zeros,  # HBM, the same memory as `out`
    out,  # HBM, like q
    q_tiles,  # VMEM [2, kv_heads, rows, head_dim]
    k_chunks,  # VMEM [STAGES, kv_heads, keys, head_dim]
    v_chunks,
    acc,  # VMEM float32 [kv_heads, rows, head_dim]
    maximum,  # VMEM float32 [kv_heads, rows, LANES], the same in all lanes
    total,
    out_tile,  # VMEM [kv_heads, rows, head_dim]
    q_done,  # DMA semaphores [2]
    kv_done,  # DMA semaphores [2, STAGES]
    out_done,  # DMA semaphores [2]: merged, written
    *,
    tokens: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    table_width: int,
) -> None:
    kv_heads, rows, _ = acc.shape
    keys, block_size = k_chunks.shape[2], k_cache.shape[2]
    group = rows // tokens
    num_tiles = count[0]
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None

    def tile_at(number) -> _Tile:
        first = jnp.minimum(number, items.shape[0] // FIELDS - 1) * FIELDS
        return _Tile(*(items[first + i] for i in range(FIELDS)))

    def rows_of(ref, tile: _Tile):
        return ref.at[:, pl.ds(pl.multiple_of(tile.token * group, SUBLANES), rows), :]

    def q_copy(number):
        stage = lax.rem(number, 2)
        return pltpu.make_async_copy(rows_of(q, tile_at(number)), q_tiles.at[stage], q_done.at[stage])

    def out_copy(number):
        return pltpu.make_async_copy(out_tile, rows_of(out, tile_at(number)), out_done.at[1])

    def for_pages(tile: _Tile, chunk, step, act) -> None:
        """`act` on the copies of K and V of a chunk's pages; pages behind the last key have none."""
        stage = lax.rem(step, STAGES)
        pages = keys // block_size
        first = chunk * pages

        def one(page, _) -> None:
            block = tables[tile.row * table_width + first + page]
            place = pl.ds(pl.multiple_of(page * block_size, SUBLANES), block_size)
            for i, (cache, chunks) in enumerate(((k_cache, k_chunks), (v_cache, v_chunks))):
                act(pltpu.make_async_copy(cache.at[block], chunks.at[stage, :, place, :], kv_done.at[i, stage]))

        lax.fori_loop(0, jnp.minimum(pl.cdiv(tile.num_keys, block_size) - first, pages), one, None)

    def start(copy) -> None:
        copy.start()

    def wait(copy) -> None:
        copy.wait()

    def token_of(shape: tuple[int, ...]) -> jax.Array:
        """Which token of the tile a row belongs to."""
        return lax.div(lax.broadcasted_iota(jnp.int32, shape, 0), jnp.int32(group))

    def clear_unused_values(tile: _Tile, chunk, stage) -> None:
        """0 x NaN is NaN: what no query of the tile sees must not reach the product."""
        first, last = tile.first_key(window), tile.num_keys

        @pl.when((chunk * keys < first) | (chunk * keys + keys > last))
        def _() -> None:
            key = chunk * keys + lax.broadcasted_iota(jnp.int32, v_chunks.shape[2:], 0)
            for head in range(kv_heads):
                values = v_chunks[stage, head]
                v_chunks[stage, head] = jnp.where((key >= first) & (key < last), values, jnp.zeros_like(values))

    def attend_chunk(tile: _Tile, chunk, q_stage, stage) -> None:
        position = tile.position + token_of((rows, keys))
        key = chunk * keys + lax.broadcasted_iota(jnp.int32, (rows, keys), 1)
        is_seen = key <= position
        if window is not None:
            is_seen &= key > position - window
        for head in range(kv_heads):
            scores = scale * lax.dot_general(
                q_tiles[q_stage, head],
                k_chunks[stage, head],
                (((1,), (1,)), ((), ())),
                precision=precision,
                preferred_element_type=jnp.float32,
            )
            if softcap is not None:
                scores = softcap * jnp.tanh(scores / softcap)
            scores = jnp.where(is_seen, scores, MASKED)
            old = maximum[head][:, :1]
            new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.where(is_seen, jnp.exp(scores - new), 0.0)
            shrink = jnp.exp(old - new)
            maximum[head] = jnp.broadcast_to(new, (rows, LANES))
            total[head] = total[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
            acc[head] = acc[head] * shrink + jnp.dot(
                weights.astype(v_chunks.dtype),
                v_chunks[stage, head],
                precision=precision,
                preferred_element_type=jnp.float32,
            )

    def write(number, tile: _Tile) -> None:
        pl.when(number > 0)(lambda: out_copy(number - 1).wait())
        if tokens > 1:  # the tile before this one may have written some of these tokens
            merged = pltpu.make_async_copy(rows_of(out, tile), out_tile, out_done.at[0])
            merged.start()
            merged.wait()
        token = token_of(out_tile.shape[1:])
        is_ours = (token >= tile.low) & (token < tile.high)
        for head in range(kv_heads):
            sums = total[head][:, :1]
            result = (acc[head] / jnp.where(sums > 0, sums, 1.0)).astype(out_tile.dtype)
            out_tile[head] = result if tokens == 1 else jnp.where(is_ours, result, out_tile[head])
        out_copy(number).start()

    def walk_tile(number, step):
        """`step` counts chunks over all tiles."""
        tile, after = tile_at(number), tile_at(number + 1)
        q_stage = lax.rem(number, 2)
        pl.when(number + 1 < num_tiles)(lambda: q_copy(number + 1).start())
        q_copy(number).wait()
        acc[...] = jnp.zeros_like(acc)
        if sinks is None:
            maximum[...] = jnp.full_like(maximum, MASKED)
            total[...] = jnp.zeros_like(total)
        else:
            maximum[...] = sinks[...]
            total[...] = jnp.ones_like(total)
        first = lax.div(tile.first_key(window), keys)
        last = pl.cdiv(tile.num_keys, keys)

        def walk_chunk(chunk, step):
            is_more = chunk + 1 < last
            pl.when(is_more)(lambda: for_pages(tile, chunk + 1, step + 1, start))
            pl.when(~is_more & (number + 1 < num_tiles))(
                lambda: for_pages(after, lax.div(after.first_key(window), keys), step + 1, start)
            )
            for_pages(tile, chunk, step, wait)
            stage = lax.rem(step, STAGES)
            clear_unused_values(tile, chunk, stage)
            attend_chunk(tile, chunk, q_stage, stage)
            return step + 1

        step = lax.fori_loop(first, last, walk_chunk, step)
        write(number, tile)
        return step

    @pl.when(num_tiles > 0)
    def _() -> None:
        tile = tile_at(0)
        q_copy(0).start()
        for_pages(tile, lax.div(tile.first_key(window), keys), 0, start)
        lax.fori_loop(0, num_tiles, walk_tile, jnp.int32(0))
        out_copy(num_tiles - 1).wait()
