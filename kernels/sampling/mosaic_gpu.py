"""Sampling on Hopper: one pass over the logits that leaves two numbers a tile, then a small kernel that chooses."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxinfer.kernels.lowering import ask_ptxas_once
from jaxinfer.kernels.sampling import reference
from jaxinfer.kernels.sampling.mosaic_gpu_common import BLOCK, MIN_VOCAB, TILE, RowShape
from jaxinfer.kernels.sampling.mosaic_gpu_cuts import CutsParams, pick_with_cuts
from jaxinfer.kernels.sampling.mosaic_gpu_pick import pick
from jaxinfer.kernels.sampling.mosaic_gpu_slots import sample_and_advance
from jaxinfer.kernels.sampling.mosaic_gpu_tiles import TilesParams, reduce_tiles
from jaxinfer.kernels.sampling.noise import Stream, gumbel, row_keys
from jaxinfer.kernels.sampling.reference import Slots
from jaxinfer.sharding.collectives import all_max

ask_ptxas_once()

MAX_VOCAB = BLOCK * TILE * TILE  # the maxima of all tiles are a block of shared memory


@dataclasses.dataclass(frozen=True)
class Params:
    """Tuning of the kernels."""

    tiles: TilesParams = dataclasses.field(default_factory=TilesParams)
    cuts: CutsParams = dataclasses.field(default_factory=CutsParams)


def check_supported(vocab: int) -> None:
    """Raises NotImplementedError, with the value, for what the kernels cannot do."""
    if vocab > MAX_VOCAB:
        raise NotImplementedError(f"{vocab} logits a row: at most {MAX_VOCAB}")


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    *,
    min_p: jax.Array | None = None,
    top_k: jax.Array | None = None,
    top_p: jax.Array | None = None,
    params: Params = Params(),
) -> jax.Array:
    """See `api.sample`. Rows that are no whole tiles are copied to be so, which costs two more passes."""
    vocab = logits.shape[1]
    check_supported(vocab)
    tiles = _as_tiles(logits)
    is_cut = not (min_p is None and top_k is None and top_p is None)
    known = reduce_tiles(tiles, temperature, params=params.tiles, with_seconds=is_cut)
    rows = (temperature, seeds, positions)
    if not is_cut:
        return pick(tiles, known, rows)
    off, shape = tiles.shape[1] * TILE, temperature.shape
    cuts = (
        jnp.full(shape, -jnp.inf) if min_p is None else jnp.log(min_p),
        jnp.full(shape, off, jnp.int32) if top_k is None else jnp.where(top_k < vocab, jnp.maximum(top_k, 1), off),
        jnp.ones(shape) if top_p is None else top_p,
    )
    return pick_with_cuts(tiles, known, rows, cuts, params=params.cuts)


def sample_slots(
    logits: jax.Array,
    slot_ids: jax.Array,
    samples: jax.Array,
    num_tokens: jax.Array,
    slots: Slots,
    *,
    params: Params = Params(),
) -> tuple[jax.Array, Slots]:
    """See `api.sample_slots`: two kernels, or one, and nothing beside them."""
    check_supported(logits.shape[1])
    tiles = _as_tiles(logits)
    return sample_and_advance(tiles, (slot_ids, samples, num_tokens), slots, params=params.tiles)


def candidates(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    first_tile: jax.Array,
    axis_name: str,
    *,
    params: Params = Params(),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See `sharded.candidates`: one pass over the logits, then a few numbers a tile."""
    check_supported(logits.shape[1])
    tiles = _as_tiles(logits)
    shape = RowShape(tiles.shape[1])
    maxima, sums = (x.reshape(x.shape[0], -1) for x in reduce_tiles(tiles, temperature, params=params.tiles))
    numbers, is_own = shape.tiles(jnp.arange(shape.num_entries, dtype=jnp.int32))
    maxima, sums = jnp.where(is_own[None], maxima, -jnp.inf), jnp.where(is_own[None], sums, 0.0)
    is_nan = jnp.any(jnp.isnan(maxima) | jnp.isnan(sums), axis=1)
    best = all_max(jnp.where(is_nan, jnp.inf, jnp.max(maxima, axis=1)), axis_name)
    scaled, is_drawn = reference.scale(maxima, best, temperature), temperature > 0
    noise = gumbel(row_keys(seeds, positions, Stream.TILE), (first_tile + numbers)[None])
    scores = jnp.where((sums > 0), scaled + jnp.where(is_drawn[:, None], jnp.log(sums) + noise, 0.0), -jnp.inf)
    tile = numbers[reference.argmax_lowest(scores)]
    inside = jnp.take_along_axis(tiles, tile[:, None, None], axis=1)[:, 0]
    drawn = reference.draw_inside(reference.scale(inside, best, temperature), seeds, positions, first_tile + tile)
    greedy = (first_tile + tile) * TILE + reference.argmax_lowest(inside)
    return best, jnp.max(scores, axis=1), jnp.where(is_drawn, drawn, greedy)


def _as_tiles(logits: jax.Array) -> jax.Array:
    """[S, V] -> [S, tiles, 128], a copy where V is no multiple of 128 or is small."""
    vocab = logits.shape[1]
    padded = max(-(-vocab // TILE) * TILE, MIN_VOCAB)
    if padded != vocab:
        logits = jnp.pad(logits, ((0, 0), (0, padded - vocab)), constant_values=-jnp.inf)
    return logits.reshape(logits.shape[0], -1, TILE)
