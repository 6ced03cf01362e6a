"""The choice with min-p, top-k and top-p: a CTA a row, no sort.

Every cut keeps a prefix of the order (scaled logit descending, id ascending): all ids above a threshold, and of the
ids at the threshold the first few. So a row takes these steps, of which it skips those that its parameters do not need:

    1  a lower bound of the threshold from the two largest logits and the sum of each tile
    2  with it, what of the row can matter is gathered into shared memory, where that fits: see `mosaic_gpu_memory`.
       Else each pass streams the row through it, until the bracket leaves little enough
    3  top-k: the k-th largest logit; then what is kept, and its mass (ids that temperature rounds to equal scaled
       logits count as equal)
    4  top-p: likewise by mass
    5  where some of the ids at the threshold stay out: the last that is kept
    6  the draw, over the tiles that hold anything

Top-k 50 of independent logits gathers the maxima of all tiles and about one whole tile of 1,187.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.sampling.mosaic_gpu_common import (
    BLOCK,
    INF,
    LOG2E,
    NO_ID,
    TILE,
    Entries,
    Row,
    RowShape,
    best_id,
    divisor,
    gumbel,
    iota,
    is_finite,
    read_entries,
    read_row,
)
from jaxinfer.kernels.sampling.mosaic_gpu_memory import STREAMING, Block, CutsParams, Memory, scratch
from jaxinfer.kernels.sampling.mosaic_gpu_pick import pick_id, pick_tile
from jaxinfer.kernels.sampling.mosaic_gpu_search import LOWEST, Pass, crossing, first_place, lower_bound

ALL = np.int32(1 << 30)
BOUND_PASSES = 24  # a bound need not be the best one
NEAR_BOTTOM = (1 / 64, 1 / 8, 1 / 2)  # a bound by count leaves few to drop
EVEN = (1 / 4, 1 / 2, 3 / 4)


class Kept(NamedTuple):
    """A prefix of the order: ids above the threshold, and the first `num_ties` of those at it. Scalars."""

    threshold: jax.Array  # a scaled logit
    num_ties: jax.Array
    num_left_out: jax.Array  # ties that are not kept
    num_ids: jax.Array
    mass: jax.Array
    bound: jax.Array  # a logit that everything kept reaches
    num_slots: jax.Array


@dataclasses.dataclass(frozen=True)
class Census:
    """What lies above a scaled logit and at it."""

    num_above: jax.Array
    mass_above: jax.Array
    num_ties: jax.Array


class Cutter:
    """Finds what the cuts keep of one row; `num_slots` is the state of its `Memory`."""

    def __init__(self, row: Row, memory: Memory, entries: Entries):
        assert entries.seconds is not None
        self.row, self.memory, self.entries = row, memory, entries
        self.seconds = jnp.where(entries.is_own, entries.seconds, -INF)
        self.factor = np.float32(LOG2E) / divisor(row.temperature)

    def weight(self, logits: jax.Array) -> jax.Array:
        return jnp.exp2((logits - self.row.best) * self.factor)

    def tie_weight(self, threshold: jax.Array) -> jax.Array:
        return jnp.exp2(threshold * np.float32(LOG2E))

    def tile_masses(self) -> jax.Array:
        entries = self.entries
        return jnp.where(entries.is_own, self.weight(entries.maxima) * entries.sums, np.float32(0))

    def everything(self, vocab: int) -> Kept:
        no_bounds = (jnp.float32(-INF), jnp.int32(ALL), jnp.int32(0))
        mass = jnp.sum(self.tile_masses())
        return Kept(*no_bounds, jnp.int32(vocab), mass, jnp.float32(LOWEST), jnp.int32(STREAMING))

    # -- lower bounds from what is known of the tiles -------------------------------------------------

    def count_bound(self, k: jax.Array) -> jax.Array:
        """A bound that at least k logits reach, or LOWEST."""

        def at_least(bound: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(self.entries.maxima >= bound, 1, 0) + jnp.where(self.seconds >= bound, 1, 0))

        return self._bound(at_least, k, enough=k + (k >> 4) + 1)

    def mass_bound(self, mass: jax.Array) -> jax.Array:
        """A bound such that the logits that reach it have at least this mass, or LOWEST."""
        mass = mass * np.float32(1 + 1e-4)  # sums differ by rounding
        peaks, whole = self.weight(self.entries.maxima), self.tile_masses()
        pairs = peaks + self.weight(self.seconds)

        def at_least(bound: jax.Array) -> jax.Array:
            deep = jnp.maximum(pairs, whole - (TILE - 2) * self.weight(bound))
            inside = jnp.where(self.seconds >= bound, deep, peaks)
            return jnp.sum(jnp.where(self.entries.maxima >= bound, inside, np.float32(0)))

        return self._bound(at_least, mass, enough=mass * np.float32(1.02))

    def _bound(self, function: Callable[[jax.Array], jax.Array], target: jax.Array, *, enough: jax.Array) -> jax.Array:
        maxima = self.entries.maxima
        lowest = jnp.min(jnp.where(maxima >= LOWEST, maxima, INF))
        return lower_bound(function, target, lowest, self.row.best, enough=enough, max_passes=BOUND_PASSES)

    def gather(self, bound: jax.Array, num_slots: jax.Array) -> jax.Array:
        """Gathers what reaches the bound, or what scaling rounds to it, if it is time to."""
        is_deep = (self.seconds >= LOWEST) & (self.row.scale(self.seconds) >= self.row.scale(bound))
        count = jnp.sum(jnp.where(is_deep, 1, 0))
        is_time = (num_slots < 0) & (count <= self.memory.capacity)

        @pl.when(is_time)
        def _() -> None:
            self.memory.gather(self.entries, is_deep, count)

        return jnp.where(is_time, self.entries.tiles.shape[0] + count, num_slots)

    # -- passes over the logits -----------------------------------------------------------------------

    def threshold(
        self, target: jax.Array, lo: jax.Array, num_slots: jax.Array, *, by_mass: bool
    ) -> tuple[jax.Array, jax.Array]:
        """(the largest logit from which on there are `target` logits, or that mass; num_slots)."""
        dtype = jnp.float32 if by_mass else jnp.int32

        def evaluate(
            pivots: Sequence[jax.Array], lo: jax.Array, hi: jax.Array, num_slots: jax.Array
        ) -> tuple[Pass, jax.Array]:
            num_slots = self.gather(lo, num_slots)

            def add(x: jax.Array, carry: tuple) -> tuple:
                *totals, smallest, largest = carry
                amount = self.weight(x) if by_mass else 1
                totals = [
                    total + jnp.where(x >= pivot, amount, jnp.zeros((), dtype))
                    for total, pivot in zip(totals, pivots, strict=True)
                ]
                smallest = jnp.minimum(smallest, jnp.where(x >= lo, x, INF))
                return *totals, smallest, jnp.maximum(largest, jnp.where(x < hi, x, -INF))

            full = self.memory.full_slice
            init = (*(full(0, dtype) for _ in pivots), full(INF, jnp.float32), full(-INF, jnp.float32))
            *totals, smallest, largest = self.memory.for_slices(num_slots, add, init)
            return Pass([jnp.sum(total) for total in totals], jnp.min(smallest), jnp.max(largest)), num_slots

        fractions = EVEN if by_mass else NEAR_BOTTOM
        return crossing(evaluate, target, lo, self.row.best, num_slots, fractions=fractions)

    def census(self, threshold: jax.Array, num_slots: jax.Array) -> Census:
        def add(x: jax.Array, carry: tuple) -> tuple:
            scaled = self.row.scale(x)
            is_above = scaled > threshold
            return (
                carry[0] + jnp.where(is_above, 1, 0),
                carry[1] + jnp.where(is_above, self.weight(x), np.float32(0)),
                carry[2] + jnp.where(scaled == threshold, 1, 0),
            )

        init = tuple(self.memory.full_slice(0, dtype) for dtype in (jnp.int32, jnp.float32, jnp.int32))
        num_above, mass, num_ties = self.memory.for_slices(num_slots, add, init)
        return Census(jnp.sum(num_above), jnp.sum(mass), jnp.sum(num_ties))

    # -- the cuts -------------------------------------------------------------------------------------

    def min_p(self, log_min_p: jax.Array, kept: Kept) -> Kept:
        bound = self.row.best + log_min_p * divisor(self.row.temperature)
        bound -= np.float32(1e-5) * (jnp.abs(bound) + jnp.abs(self.row.best))
        num_slots = self.gather(bound, kept.num_slots)
        found = self.census(log_min_p, num_slots)
        mass = found.mass_above + found.num_ties.astype(jnp.float32) * self.tie_weight(log_min_p)
        return Kept(log_min_p, jnp.int32(ALL), jnp.int32(0), found.num_above + found.num_ties, mass, bound, num_slots)

    def top_k(self, k: jax.Array, kept: Kept) -> Kept:
        bound = jnp.maximum(kept.bound, self.count_bound(k))
        bound, num_slots = self.threshold(k, bound, kept.num_slots, by_mass=False)
        threshold = self.row.scale(bound)
        found = self.census(threshold, num_slots)
        num_ties = jnp.minimum(k - found.num_above, found.num_ties)
        mass = found.mass_above + num_ties.astype(jnp.float32) * self.tie_weight(threshold)
        return Kept(threshold, num_ties, found.num_ties - num_ties, k, mass, bound, num_slots)

    def top_p(self, p: jax.Array, kept: Kept) -> Kept:
        target = p * kept.mass
        bound = lax.cond(kept.bound > LOWEST, lambda: kept.bound, lambda: self.mass_bound(target))
        bound, num_slots = self.threshold(target, bound, kept.num_slots, by_mass=True)
        threshold = self.row.scale(bound)
        found = self.census(threshold, num_slots)
        num_ties = self._ties_below(target, threshold, found)
        num_ties = jnp.where(threshold == kept.threshold, jnp.minimum(num_ties, kept.num_ties), num_ties)
        return Kept(threshold, num_ties, found.num_ties - num_ties, kept.num_ids, kept.mass, bound, num_slots)

    def _ties_below(self, target: jax.Array, threshold: jax.Array, found: Census) -> jax.Array:
        """How many ties have less than the target strictly before them."""
        weight = self.tie_weight(threshold)
        limit = found.num_ties.astype(jnp.float32) + 1
        count = jnp.minimum((target - found.mass_above) / jnp.maximum(weight, np.float32(1e-37)), limit)
        count = jnp.maximum(count, np.float32(0)).astype(jnp.int32) + 2
        for _ in range(3):  # rounding
            before = found.mass_above + (count - 1).astype(jnp.float32) * weight
            count = jnp.where(before < target, count, count - 1)
        return jnp.clip(count, 1, found.num_ties)

    # -- the choice -----------------------------------------------------------------------------------

    def last_tie(self, kept: Kept) -> jax.Array:
        """The id of the last tie that is kept."""

        def is_tie(logits: jax.Array) -> jax.Array:
            return self.row.scale(logits) == kept.threshold

        tiles, counts = self.memory.count_by_slot(kept.num_slots, is_tie)
        shallow = jnp.where(is_tie(self.memory.shallow(kept.num_slots)), 1, 0)

        def before_tile(tile: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(tiles < tile, counts, 0)) + jnp.sum(
                jnp.where(self.entries.tiles < tile, shallow, 0)
            )

        tile = first_place(before_tile, kept.num_ties, self.memory.num_tiles)
        left = kept.num_ties - before_tile(tile)
        ties, columns = jnp.where(is_tie(self.memory.tile(tile)), 1, 0), iota(TILE)
        return tile * TILE + first_place(lambda end: jnp.sum(jnp.where(columns < end, ties, 0)), left, TILE)

    def draw(self, kept: Kept, last_tie: jax.Array) -> jax.Array:
        """The token."""
        row, memory = self.row, self.memory

        def is_kept(scaled: jax.Array, ids: jax.Array, last: jax.Array) -> jax.Array:
            return (scaled > kept.threshold) | ((scaled == kept.threshold) & (ids <= last))

        def draw_block(block: Block, carry: tuple) -> tuple:
            scaled = row.scale(memory.block(block))
            tiles = memory.block_tiles(kept.num_slots, block)
            shape = scaled.shape
            columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            ids = lax.broadcast_in_dim(tiles * TILE, shape, [0]) + columns
            maxima = jnp.max(scaled, axis=1)
            maxima = jnp.where(maxima > LOWEST, maxima, np.float32(0))
            weights = jnp.exp2((scaled - lax.broadcast_in_dim(maxima, shape, [0])) * np.float32(LOG2E))
            sums = jnp.sum(jnp.where(is_kept(scaled, ids, last_tie), weights, np.float32(0)), axis=1)
            scores = maxima + jnp.log(sums) + gumbel(row.tile_words, tiles)
            is_better = memory.is_used(block) & (sums > 0) & (scores > carry[0])
            return jnp.where(is_better, scores, carry[0]), jnp.where(is_better, tiles, carry[1])

        layout = plgpu.Layout.WGMMA.reduce(1)
        none = plgpu.layout_cast(jnp.full((BLOCK,), -INF, jnp.float32), layout)
        no_tile = plgpu.layout_cast(jnp.full((BLOCK,), 0, jnp.int32), layout)
        scores, tiles = memory.for_blocks(kept.num_slots, draw_block, (none, no_tile))
        scaled = row.scale(memory.shallow(kept.num_slots))
        is_in = is_kept(scaled, self.entries.tiles, last_tie // TILE) & (scaled > -INF)
        shallow_scores = jnp.where(is_in, scaled + gumbel(row.tile_words, self.entries.tiles), -INF)
        is_shallow = jnp.max(shallow_scores) > jnp.max(scores)
        tile = jnp.where(is_shallow, best_id(shallow_scores, self.entries.tiles), best_id(scores, tiles))
        scaled, ids = row.scale(memory.tile(tile)), tile * TILE + iota(TILE)
        noisy = scaled + gumbel(row.id_words, ids)
        return best_id(jnp.where(is_kept(scaled, ids, last_tie), noisy, -INF), ids)


def _cuts_kernel(
    tiles_ref: Any,  # [S, tiles, 128]
    maxima_ref: Any,  # [S, entries / 128, 128]
    sums_ref: Any,  # likewise
    seconds_ref: Any,  # likewise
    temperature_ref: Any,  # [S]
    seeds_ref: Any,  # [S, 2]
    positions_ref: Any,  # [S]
    log_min_p_ref: Any,  # [S]
    top_k_ref: Any,  # [S]
    top_p_ref: Any,  # [S]
    out_ref: Any,  # [S]
    *,
    params: CutsParams,
) -> None:
    index = lax.axis_index("row")
    shape = RowShape(tiles_ref.shape[1])
    vocab = shape.num_tiles * TILE

    @functools.partial(pl.run_scoped, **scratch(shape, params))
    def _scope(**refs: Any) -> None:
        entries = read_entries(index, shape, maxima_ref, sums_ref, seconds_ref)
        row = read_row(index, jnp.max(entries.maxima), temperature_ref, seeds_ref, positions_ref)
        log_min_p, k, p = log_min_p_ref[index], top_k_ref[index], top_p_ref[index]
        memory = Memory(refs, tiles_ref, index, shape, params)
        cutter = Cutter(row, memory, entries)

        def pick_uncut() -> jax.Array:
            tile = pick_tile(row, entries)
            return pick_id(row, memory.tile(tile), tile)

        def pick_cut() -> jax.Array:
            kept = cutter.everything(vocab)
            kept = lax.cond(log_min_p > -INF, lambda: cutter.min_p(log_min_p, kept), lambda: kept)
            kept = lax.cond(k < kept.num_ids, lambda: cutter.top_k(k, kept), lambda: kept)
            kept = lax.cond(p < 1, lambda: cutter.top_p(p, kept), lambda: kept)
            last_tie = lax.cond(kept.num_left_out > 0, lambda: cutter.last_tie(kept), lambda: NO_ID)
            return cutter.draw(kept, last_tie)

        is_cut = (log_min_p > -INF) | (k < vocab) | (p < 1)

        @pl.when(~is_finite(row.best))
        def _() -> None:
            out_ref[index] = jnp.int32(-1)

        @pl.when(is_finite(row.best) & row.is_drawn & is_cut)
        def _() -> None:
            out_ref[index] = pick_cut()

        @pl.when(is_finite(row.best) & ~(row.is_drawn & is_cut))
        def _() -> None:
            out_ref[index] = pick_uncut()


def pick_with_cuts(
    tiles: jax.Array,
    known: Sequence[jax.Array],
    rows: Sequence[jax.Array],
    cuts: Sequence[jax.Array],
    *,
    params: CutsParams,
) -> jax.Array:
    """The tokens, int32 [S].

    Args:
      tiles: the logits, float32 [S, tiles, 128].
      known: what `reduce_tiles` made of them, with seconds.
      rows: temperature, seeds and positions.
      cuts: the logarithm of min_p, top_k and top_p, [S] each.
    """
    kernel = plgpu.kernel(
        functools.partial(_cuts_kernel, params=params),
        out_type=jax.ShapeDtypeStruct((tiles.shape[0],), jnp.int32),
        grid=(tiles.shape[0],),
        grid_names=("row",),
        kernel_name="sampling_cuts",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(tiles, *known, *rows, *cuts)
