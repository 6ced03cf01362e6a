"""The choice where nothing is cut: a CTA a row picks a tile from what is known of the tiles, then an id inside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
    Entries,
    Row,
    RowShape,
    best_id,
    gumbel,
    iota,
    is_finite,
    make_row,
    read_entries,
    read_row,
    strided,
)
from jaxinfer.kernels.sampling.reference import Slots


def pick_tile(row: Row, entries: Entries) -> jax.Array:
    """The tile that the draw, or greed, takes."""
    drawn = row.scale(entries.maxima) + jnp.log(entries.sums) + gumbel(row.tile_words, entries.tiles)
    scores = jnp.where(row.is_drawn, drawn, entries.maxima)
    return best_id(jnp.where(entries.is_own & (entries.sums > 0), scores, -INF), entries.tiles)


def pick_id(row: Row, logits: jax.Array, tile: jax.Array) -> jax.Array:
    """The id that the draw, or greed, takes among a tile's logits, float32 [128]."""
    ids = tile * TILE + iota(TILE)
    return best_id(jnp.where(row.is_drawn, row.scale(logits) + gumbel(row.id_words, ids), logits), ids)


def _choose(tiles_ref: Any, index: jax.Array, maxima_ref: Any, sums_ref: Any, make: Callable[..., Row]) -> jax.Array:
    """The token of row `index`, which `make` makes of the row's largest logit; -1 if there is none."""
    shape = RowShape(tiles_ref.shape[1])
    entries = read_entries(index, shape, maxima_ref, sums_ref)
    row = make(best=jnp.max(entries.maxima))
    tile = jnp.minimum(pick_tile(row, entries), shape.num_tiles - 1)  # a NaN finds none
    logits = plgpu.load(tiles_ref.at[index, tile], layout=strided((TILE,)))
    return jnp.where(is_finite(row.best), pick_id(row, logits, tile), -1)


def _pick_kernel(
    tiles_ref: Any,  # [S, tiles, 128]
    maxima_ref: Any,  # [S, entries / 128, 128]
    sums_ref: Any,  # likewise
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
    maxima_ref: Any,  # [S, entries / 128, 128]
    sums_ref: Any,  # likewise
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


def pick(tiles: jax.Array, known: Sequence[jax.Array], rows: Sequence[jax.Array]) -> jax.Array:
    """The tokens, int32 [S].

    Args:
      tiles: the logits, float32 [S, tiles, 128].
      known: what `reduce_tiles` made of them.
      rows: temperature, seeds and positions.
    """
    return _kernel(_pick_kernel, tiles.shape[0])(tiles, *by_entry_rows(known), *rows)


def pick_and_advance(
    tiles: jax.Array, known: Sequence[jax.Array], rows: Sequence[jax.Array], slots: Slots
) -> tuple[jax.Array, Slots]:
    """As `pick`, reading and writing the slots' state in place.

    Args:
      rows: slot_ids, samples and num_tokens, [S] each.
    """
    last_tokens, num_computed = jax.new_ref(slots.last_tokens), jax.new_ref(slots.num_computed)
    tables = (slots.temperature, slots.seeds, last_tokens, num_computed)
    tokens = _kernel(_advance_kernel, tiles.shape[0])(tiles, *by_entry_rows(known), *rows, *tables)
    return tokens, slots._replace(last_tokens=jax.freeze(last_tokens), num_computed=jax.freeze(num_computed))


def by_entry_rows(known: Sequence[jax.Array]) -> list[jax.Array]:
    """[S, entries] -> [S, entries / 128, 128]."""
    return [x.reshape(x.shape[0], -1, TILE) for x in known]


def _kernel(body: Callable[..., None], num_rows: int) -> Callable[..., jax.Array]:
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows,), jnp.int32),
        grid=(num_rows,),
        grid_names=("row",),
        kernel_name="sampling_pick",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
