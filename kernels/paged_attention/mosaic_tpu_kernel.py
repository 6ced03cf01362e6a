"""The kernel of the TPU's paged attention: walks query tiles, and for each the keys of its row, chunk by chunk.

chunk i        copied from HBM (K and V pages) | multiplied, KV head by KV head
chunk i + 1                                    | copied ...                         also the next tile's first
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

SUBLANES = 8
LANES = 128
STAGES = 2
FIELDS = 5  # of a tile: row, first token, low, high, position of the first token
MASKED = -1e30  # finite: a query without keys in a chunk must not make NaN


def attend_without_sinks(items, count, tables, *refs, **options) -> None:
    attend(items, count, tables, None, *refs, **options)


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


def attend(
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
