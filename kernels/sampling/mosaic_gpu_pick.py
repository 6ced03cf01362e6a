"""The choice where nothing is cut: a CTA a row picks a tile from what is known of the tiles, then an id inside it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.sampling.mosaic_gpu_common import (
    INF,
    TILE,
    Row,
    RowShape,
    best_id,
    entry_layout,
    gumbel,
    iota,
    is_finite,
    read_row,
)


def pick_tile(row: Row, maxima: jax.Array, sums: jax.Array, tiles: jax.Array, is_own: jax.Array) -> jax.Array:
    """The tile that the draw, or greed, takes; arrays are by entry."""
    drawn = row.scale(maxima) + jnp.log(sums) + gumbel(row.tile_words, tiles)
    scores = jnp.where(row.is_drawn, drawn, maxima)
    return best_id(jnp.where(is_own & (sums > 0), scores, -INF), tiles)


def pick_id(row: Row, logits: jax.Array, tile: jax.Array) -> jax.Array:
    """The id that the draw, or greed, takes among a tile's logits, float32 [128]."""
    ids = tile * TILE + iota(TILE)
    return best_id(jnp.where(row.is_drawn, row.scale(logits) + gumbel(row.id_words, ids), logits), ids)


def _pick_kernel(
    tiles_ref: Any,  # [S, tiles, 128]
    maxima_ref: Any,  # [S, entries]
    sums_ref: Any,  # [S, entries]
    temperature_ref: Any,  # [S]
    seeds_ref: Any,  # [S, 2]
    positions_ref: Any,  # [S]
    out_ref: Any,  # [S]
) -> None:
    index = lax.axis_index("row")
    shape = RowShape(tiles_ref.shape[1])
    layout = entry_layout(shape)
    maxima = plgpu.load(maxima_ref.at[index], layout=layout)
    sums = plgpu.load(sums_ref.at[index], layout=layout)
    tiles, is_own = shape.tiles(iota(shape.num_entries))
    maxima = jnp.where(is_own, maxima, -INF)
    row = read_row(index, jnp.max(maxima), temperature_ref, seeds_ref, positions_ref)
    tile = jnp.minimum(pick_tile(row, maxima, sums, tiles, is_own), shape.num_tiles - 1)  # a NaN finds none
    logits = plgpu.load(tiles_ref.at[index, tile], layout=plgpu.Layout.WG_STRIDED((TILE,), vec_size=1))
    out_ref[index] = jnp.where(is_finite(row.best), pick_id(row, logits, tile), -1)


def pick(
    tiles: jax.Array,
    maxima: jax.Array,
    sums: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """The tokens, int32 [S], from logits float32 [S, tiles, 128] and what `reduce_tiles` made of them."""
    kernel = plgpu.kernel(
        _pick_kernel,
        out_type=jax.ShapeDtypeStruct((tiles.shape[0],), jnp.int32),
        grid=(tiles.shape[0],),
        grid_names=("row",),
        kernel_name="sampling_pick",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(tiles, maxima, sums, temperature, seeds, positions)
