"""The specification of `paged_attention`, in plain jnp and bounded memory.

Queries are cut into tiles that belong to one row each; all tiles walk the keys together, a chunk of blocks at a
time, with the online softmax of Milakov and Gimelshein (arXiv 1805.02867). The walk ends where the longest row ends,
so its cost follows `seq_lens`, not the width of the table; memory is tiles x chunk, whatever the length.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

QUERY_TILE = 16
KEY_CHUNK = 128
MASKED = -1e30  # finite: a row without keys must not make NaN


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
) -> jax.Array:
    """See `api.paged_attention`."""
    num_tokens, heads, head_dim = q.shape
    num_rows, max_blocks = block_tables.shape
    _, kv_heads, block_size, _ = k_cache.shape
    group = heads // kv_heads
    tile = 1 if num_tokens <= num_rows else min(QUERY_TILE, num_tokens)
    num_tiles = num_tokens if tile == 1 else -(-num_tokens // tile) + num_rows
    blocks_per_chunk = max(1, KEY_CHUNK // block_size)
    chunk = blocks_per_chunk * block_size

    # Which row a tile belongs to, which tokens it holds, and where these are in their row.
    num_queries = query_start_loc[1:] - query_start_loc[:-1]
    tiles_end = jnp.cumsum(-(-num_queries // tile))
    numbers = jnp.arange(num_tiles, dtype=jnp.int32)
    row = jnp.searchsorted(tiles_end, numbers, side="right", method="compare_all").astype(jnp.int32)
    is_used = row < num_rows
    row = jnp.minimum(row, num_rows - 1)
    first = (numbers - jnp.where(row > 0, tiles_end[row - 1], 0)) * tile
    offsets = first[:, None] + jnp.arange(tile, dtype=jnp.int32)[None, :]
    is_query = (offsets < num_queries[row][:, None]) & is_used[:, None]  # [tiles, tile]
    token = jnp.where(is_query, query_start_loc[row][:, None] + offsets, num_tokens)
    position = (seq_lens - num_queries)[row][:, None] + offsets
    num_keys = jnp.max(jnp.where(is_query, position + 1, 0), axis=1)  # [tiles]

    tiles = q.at[token].get(mode="fill", fill_value=0).astype(jnp.float32)
    tiles = tiles.reshape(num_tiles, tile, kv_heads, group, head_dim).swapaxes(1, 2)
    tiles = tiles.reshape(num_tiles, kv_heads, tile * group, head_dim) * scale
    query_position = jnp.repeat(position, group, axis=1)[:, None, :, None]  # [tiles, 1, tile * group, 1]
    tables = block_tables[row]

    def load(cache: jax.Array, blocks: jax.Array, factor: jax.Array | None) -> jax.Array:
        pages = cache[blocks].swapaxes(1, 2).reshape(num_tiles, kv_heads, chunk, head_dim).astype(jnp.float32)
        return pages if factor is None else pages * factor

    def walk(number: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]):
        maximum, total, acc = state
        columns = number * blocks_per_chunk + jnp.arange(blocks_per_chunk, dtype=jnp.int32)
        is_needed = columns[None, :] * block_size < num_keys[:, None]
        blocks = jnp.where(is_needed, tables[:, jnp.minimum(columns, max_blocks - 1)], 0)
        keys = load(k_cache, blocks, k_scale)
        values = load(v_cache, blocks, v_scale)
        key_position = number * chunk + jnp.arange(chunk, dtype=jnp.int32)
        exists = (key_position[None, :] < num_keys[:, None])[:, None, :, None]
        values = jnp.where(exists, values, 0.0)  # unused slots may hold NaN, and 0 x NaN is NaN
        scores = jnp.einsum("tkqd,tkcd->tkqc", tiles, keys, precision="highest")
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        is_seen = key_position[None, None, None, :] <= query_position
        if window is not None:
            is_seen &= key_position[None, None, None, :] > query_position - window
        scores = jnp.where(is_seen, scores, MASKED)
        new_maximum = jnp.maximum(maximum, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.where(is_seen, jnp.exp(scores - new_maximum), 0.0)
        shrink = jnp.exp(maximum - new_maximum)
        total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        acc = acc * shrink + jnp.einsum("tkqc,tkcd->tkqd", weights, values, precision="highest")
        return new_maximum, total, acc

    shape = (num_tiles, kv_heads, tile * group, 1)
    maximum, total = jnp.full(shape, MASKED, jnp.float32), jnp.zeros(shape, jnp.float32)
    if sinks is not None:
        per_head = sinks.astype(jnp.float32).reshape(1, kv_heads, 1, group)
        maximum = jnp.broadcast_to(per_head, (num_tiles, kv_heads, tile, group)).reshape(shape)
        total = jnp.ones(shape, jnp.float32)
    acc = jnp.zeros((*shape[:3], head_dim), jnp.float32)
    start = jnp.int32(0)
    if window is not None:
        oldest = jnp.where(is_query[:, 0], position[:, 0] - window + 1, jnp.int32(2**30))
        start = jnp.maximum(jnp.min(oldest), 0) // chunk
    stop = -(-jnp.max(num_keys) // chunk)
    _, total, acc = jax.lax.fori_loop(start, stop, walk, (maximum, total, acc))

    out = (acc / jnp.where(total > 0, total, 1.0)).astype(q.dtype)
    out = out.reshape(num_tiles, kv_heads, tile, group, head_dim).swapaxes(1, 2)
    out = out.reshape(num_tiles * tile, heads, head_dim)
    return jnp.zeros_like(q).at[token.reshape(-1)].set(out, mode="drop")
