"""The choice where nothing is cut: a CTA a row picks a tile from what is known of the tiles, then an id inside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
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
    make_row,
    read_row,
)
from jaxinfer.kernels.sampling.reference import Slots


def pick_tile(row: Row, maxima: jax.Array, sums: jax.Array, tiles: jax.Array, is_own: jax.Array) -> jax.Array:
    """The tile that the draw, or greed, takes; arrays are by entry."""
    drawn = row.scale(maxima) + jnp.log(sums) + gumbel(row.tile_words, tiles)
    scores = jnp.where(row.is_drawn, drawn, maxima)
    return best_id(jnp.where(is_own & (sums > 0), scores, -INF), tiles)


def pick_id(row: Row, logits: jax.Array, tile: jax.Array) -> jax.Array:
    """The id that the draw, or greed, takes among a tile's logits, float32 [128]."""
    ids = tile * TILE + iota(TILE)
    return best_id(jnp.where(row.is_drawn, row.scale(logits) + gumbel(row.id_words, ids), logits), ids)


def _choose(tiles_ref: Any, index: jax.Array, maxima_ref: Any, sums_ref: Any, make: Callable[..., Row]) -> jax.Array:
    """The token of row `index`, which `make` makes of the row's largest logit; -1 if there is none."""
    shape = RowShape(tiles_ref.shape[1])
    layout = entry_layout(shape)
    maxima = plgpu.load(maxima_ref.at[index], layout=layout)
    sums = plgpu.load(sums_ref.at[index], layout=layout)
    tiles, is_own = shape.tiles(iota(shape.num_entries))
    maxima = jnp.where(is_own, maxima, -INF)
    row = make(best=jnp.max(maxima))
    tile = jnp.minimum(pick_tile(row, maxima, sums, tiles, is_own), shape.num_tiles - 1)  # a NaN finds none
    logits = plgpu.load(tiles_ref.at[index, tile], layout=plgpu.Layout.WG_STRIDED((TILE,), vec_size=1))
    return jnp.where(is_finite(row.best), pick_id(row, logits, tile), -1)


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
    make = functools.partial(
        read_row, index, temperature_ref=temperature_ref, seeds_ref=seeds_ref, positions_ref=positions_ref
    )
    out_ref[index] = _choose(tiles_ref, index, maxima_ref, sums_ref, make)


def _advance_kernel(
    tiles_ref: Any,  # [S, tiles, 128]
    maxima_ref: Any,  # [S, entries]
    sums_ref: Any,  # [S, entries]
    slot_ids_ref: Any,  # [S]
    samples_ref: Any,  # [S]
    num_tokens_ref: Any,  # [S]
    temperature_ref: Any,  # [B]
    seeds_ref: Any,  # [B, 2]
    last_tokens_ref: Any,  # [B], written
    num_computed_ref: Any,  # [B], read and written
    out_ref: Any,  # [S]
) -> None:
    index = lax.axis_index("row")
    slot = slot_ids_ref[index]
    is_row = slot < last_tokens_ref.shape[0]
    place = jnp.minimum(slot, last_tokens_ref.shape[0] - 1)
    position = num_computed_ref[place] + num_tokens_ref[index]
    low, high = seeds_ref[place, 0], seeds_ref[place, 1]
    temperature = jnp.where(is_row, temperature_ref[place], np.float32(0))
    make = functools.partial(make_row, index, temperature, low, high, position)
    token = _choose(tiles_ref, index, maxima_ref, sums_ref, make)
    out_ref[index] = token

    @pl.when(is_row)
    def _() -> None:
        num_computed_ref[place] = position

        @pl.when(samples_ref[index])
        def _() -> None:
            last_tokens_ref[place] = jnp.maximum(token, 0)


def pick(
    tiles: jax.Array,
    maxima: jax.Array,
    sums: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
) -> jax.Array:
    """The tokens, int32 [S], from logits float32 [S, tiles, 128] and what `reduce_tiles` made of them."""
    return _kernel(_pick_kernel, tiles.shape[0])(tiles, maxima, sums, temperature, seeds, positions)


def pick_and_advance(
    tiles: jax.Array, maxima: jax.Array, sums: jax.Array, rows: tuple[jax.Array, ...], slots: Slots
) -> tuple[jax.Array, Slots]:
    """As `pick`, reading and writing the slots' state in place.

    Args:
      rows: slot_ids, samples and num_tokens, [S] each.
    """
    last_tokens, num_computed = jax.new_ref(slots.last_tokens), jax.new_ref(slots.num_computed)
    tables = (slots.temperature, slots.seeds, last_tokens, num_computed)
    tokens = _kernel(_advance_kernel, tiles.shape[0])(tiles, maxima, sums, *rows, *tables)
    return tokens, slots._replace(last_tokens=jax.freeze(last_tokens), num_computed=jax.freeze(num_computed))


def _kernel(body: Callable[..., None], num_rows: int) -> Callable[..., jax.Array]:
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        grid=(num_rows,),
        grid_names=("row",),
        kernel_name="sampling_pick",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
