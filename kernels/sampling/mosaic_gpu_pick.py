"""The choice where nothing is cut: a CTA a row picks a tile from what is known of the tiles, then an id inside it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
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
    read_entries,
    read_row,
    strided,
)


def pick_tile(row: Row, entries: Entries) -> jax.Array:
    """The tile that the draw, or greed, takes."""
    drawn = row.scale(entries.maxima) + jnp.log(entries.sums) + gumbel(row.tile_words, entries.tiles)
    scores = jnp.where(row.is_drawn, drawn, entries.maxima)
    return best_id(jnp.where(entries.is_own & (entries.sums > 0), scores, -INF), entries.tiles)


def pick_id(row: Row, logits: jax.Array, tile: jax.Array) -> jax.Array:
    """The id that the draw, or greed, takes among a tile's logits, float32 [128]."""
    ids = tile * TILE + iota(TILE)
    return best_id(jnp.where(row.is_drawn, row.scale(logits) + gumbel(row.id_words, ids), logits), ids)


def choose_token(
    tiles_ref: Any, index: jax.Array, maxima_ref: Any, sums_ref: Any, make: Callable[..., Row]
) -> jax.Array:
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
    out_ref[index] = choose_token(tiles_ref, index, maxima_ref, sums_ref, make)


def pick(tiles: jax.Array, known: Sequence[jax.Array], rows: Sequence[jax.Array]) -> jax.Array:
    """The tokens, int32 [S].

    Args:
      tiles: the logits, float32 [S, tiles, 128].
      known: what `reduce_tiles` made of them.
      rows: temperature, seeds and positions.
    """
    kernel = plgpu.kernel(
        _pick_kernel,
        out_type=jax.ShapeDtypeStruct((tiles.shape[0],), jnp.int32),
        grid=(tiles.shape[0],),
        grid_names=("row",),
        kernel_name="sampling_pick",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(tiles, *known, *rows)
