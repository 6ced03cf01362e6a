"""The choice with min-p, top-k and top-p: a CTA a row, no sort.

Every cut keeps a prefix of the order (scaled logit descending, id ascending): all ids above a threshold, and of the
ids at the threshold the first few. So a row takes these steps, of which it skips those that its parameters do not need:

    1  a lower bound of the threshold from what is known of the tiles: k tiles have maxima of at least the k-th largest
       maximum; tiles hold at least their sums without 127 logits below a bound
    2  tiles whose maximum reaches the bound, where they are few: gathered into shared memory; else each pass streams
       the row through it, until the bracket leaves few enough
    3  top-k: the k-th largest logit; then what is kept, and its mass (ids that temperature rounds to equal scaled
       logits count as equal)
    4  top-p: likewise by mass
    5  where some of the ids at the threshold stay out: the last that is kept
    6  the draw, over the tiles that hold anything

Passes over gathered tiles touch shared memory only. Top-k 50 gathers some 50 of 1,187 tiles.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
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
    Row,
    RowShape,
    best_id,
    divisor,
    entry_layout,
    gumbel,
    iota,
    is_finite,
    read_row,
)
from jaxinfer.kernels.sampling.mosaic_gpu_memory import Block, CutsParams, Memory, scratch
from jaxinfer.kernels.sampling.mosaic_gpu_pick import pick_id, pick_tile
from jaxinfer.kernels.sampling.mosaic_gpu_search import LOWEST, Pass, search

ALL = np.int32(1 << 30)
BOUND_PASSES = 8  # over the tiles' maxima and sums; a bound need not be the best one


class Kept(NamedTuple):
    """A prefix of the order: ids above the threshold, and the first `num_ties` of those at it. Scalars."""

    threshold: jax.Array  # a scaled logit
    num_ties: jax.Array
    num_left_out: jax.Array  # ties that are not kept
    num_ids: jax.Array
    mass: jax.Array
    bound: jax.Array  # a logit that everything kept reaches
    num_gathered: jax.Array


@dataclasses.dataclass(frozen=True)
class Census:
    """What lies above a scaled logit and at it."""

    num_above: jax.Array
    mass_above: jax.Array
    num_ties: jax.Array


class Cutter:
    """Finds what the cuts keep of one row; `state` is the number of gathered tiles throughout."""

    def __init__(self, row: Row, memory: Memory, entries: tuple[jax.Array, ...], capacity: int):
        self.row, self.memory, self.capacity = row, memory, capacity
        self.maxima, self.sums, self.tiles, self.is_own = entries
        self.factor = np.float32(LOG2E) / divisor(row.temperature)

    def everything(self, vocab: int) -> Kept:
        whole = jnp.sum(jnp.where(self.is_own, self.weight(self.maxima) * self.sums, np.float32(0)))
        return Kept(
            -INF + 0 * whole, jnp.int32(ALL), jnp.int32(0), jnp.int32(vocab), whole, LOWEST + 0 * whole, jnp.int32(0)
        )

    def weight(self, logits: jax.Array) -> jax.Array:
        return jnp.exp2((logits - self.row.best) * self.factor)

    # -- lower bounds from what is known of the tiles -------------------------------------------------

    def kth_maximum(self, k: jax.Array) -> jax.Array:
        """A bound that at least k logits reach, if k tiles have any."""
        return self._bound(k, lambda pivot: jnp.where(self.maxima >= pivot, 1, 0))

    def mass_bound(self, mass: jax.Array) -> jax.Array:
        """A bound such that the logits that reach it have at least this mass."""
        peaks = self.weight(self.maxima)
        whole = jnp.where(self.is_own, peaks * self.sums, np.float32(0))

        def at_least(pivot: jax.Array) -> jax.Array:
            inside = jnp.maximum(peaks, whole - (TILE - 1) * self.weight(pivot))
            return jnp.where(self.maxima >= pivot, inside, np.float32(0))

        return self._bound(mass, at_least)

    def _bound(self, target: jax.Array, terms: Callable[[jax.Array], jax.Array]) -> jax.Array:
        def evaluate(pivots: list[jax.Array], lo: jax.Array, hi: jax.Array, state: None) -> tuple[Pass, None]:
            inside = self.is_own & (self.maxima >= lo)
            smallest = jnp.min(jnp.where(inside, self.maxima, INF))
            largest = jnp.max(jnp.where(self.maxima < hi, self.maxima, -INF))
            return Pass([jnp.sum(terms(pivot)) for pivot in pivots], smallest, largest), state

        lowest = jnp.min(jnp.where(self.is_own & (self.maxima >= LOWEST), self.maxima, INF))
        bound, reached, _ = search(evaluate, target, lowest, self.row.best, None, max_passes=BOUND_PASSES)
        return jnp.where(reached >= target, bound, LOWEST)

    def gather(self, bound: jax.Array, num_gathered: jax.Array) -> jax.Array:
        """Gathers the tiles that reach the bound, or what scaling rounds to it, if it is time to."""
        is_active = self.is_own & (self.maxima >= LOWEST) & (self.row.scale(self.maxima) >= self.row.scale(bound))
        count = jnp.sum(jnp.where(is_active, 1, 0))
        is_time = (num_gathered == 0) & (count <= self.capacity) & (count > 0)

        @pl.when(is_time)
        def _() -> None:
            self.memory.gather(is_active, self.tiles, count)

        return jnp.where(is_time, count, num_gathered)

    # -- passes over the logits -----------------------------------------------------------------------

    def crossing(
        self, target: jax.Array, lo: jax.Array, num_gathered: jax.Array, *, by_mass: bool
    ) -> tuple[jax.Array, jax.Array]:
        """(the largest logit from which on there are `target` logits, or that mass; num_gathered)."""
        dtype = jnp.float32 if by_mass else jnp.int32

        def evaluate(pivots: list, lo: jax.Array, hi: jax.Array, num_gathered: jax.Array) -> tuple[Pass, jax.Array]:
            num_gathered = self.gather(lo, num_gathered)

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
            *totals, smallest, largest = self.memory.for_slices(num_gathered, add, init)
            return Pass([jnp.sum(total) for total in totals], jnp.min(smallest), jnp.max(largest)), num_gathered

        threshold, _, num_gathered = search(evaluate, target, lo, self.row.best, num_gathered)
        return threshold, num_gathered

    def census(self, threshold: jax.Array, num_gathered: jax.Array) -> Census:
        def add(x: jax.Array, carry: tuple) -> tuple:
            scaled = self.row.scale(x)
            is_above = scaled > threshold
            return (
                carry[0] + jnp.where(is_above, 1, 0),
                carry[1] + jnp.where(is_above, self.weight(x), np.float32(0)),
                carry[2] + jnp.where(scaled == threshold, 1, 0),
            )

        init = tuple(self.memory.full_slice(0, dtype) for dtype in (jnp.int32, jnp.float32, jnp.int32))
        num_above, mass, num_ties = self.memory.for_slices(num_gathered, add, init)
        return Census(jnp.sum(num_above), jnp.sum(mass), jnp.sum(num_ties))

    def tie_weight(self, threshold: jax.Array) -> jax.Array:
        return jnp.exp2(threshold * np.float32(LOG2E))

    # -- the cuts -------------------------------------------------------------------------------------

    def min_p(self, log_min_p: jax.Array, kept: Kept) -> Kept:
        bound = self.row.best + log_min_p * divisor(self.row.temperature)
        bound -= np.float32(1e-5) * (jnp.abs(bound) + jnp.abs(self.row.best))
        num_gathered = self.gather(bound, kept.num_gathered)
        found = self.census(log_min_p, num_gathered)
        mass = found.mass_above + found.num_ties.astype(jnp.float32) * self.tie_weight(log_min_p)
        return Kept(
            log_min_p, jnp.int32(ALL), jnp.int32(0), found.num_above + found.num_ties, mass, bound, num_gathered
        )

    def top_k(self, k: jax.Array, kept: Kept) -> Kept:
        bound = jnp.maximum(kept.bound, self.kth_maximum(k))
        bound, num_gathered = self.crossing(k, bound, kept.num_gathered, by_mass=False)
        threshold = self.row.scale(bound)
        found = self.census(threshold, num_gathered)
        num_ties = jnp.minimum(k - found.num_above, found.num_ties)
        mass = found.mass_above + num_ties.astype(jnp.float32) * self.tie_weight(threshold)
        return Kept(threshold, num_ties, found.num_ties - num_ties, k, mass, bound, num_gathered)

    def top_p(self, p: jax.Array, kept: Kept) -> Kept:
        target = p * kept.mass
        bound = lax.cond(
            kept.bound > LOWEST, lambda: kept.bound, lambda: self.mass_bound(target * np.float32(1 + 1e-4))
        )
        bound, num_gathered = self.crossing(target, bound, kept.num_gathered, by_mass=True)
        threshold = self.row.scale(bound)
        found = self.census(threshold, num_gathered)
        num_ties = self._ties_below(target, threshold, found)
        num_ties = jnp.where(threshold == kept.threshold, jnp.minimum(num_ties, kept.num_ties), num_ties)
        return Kept(threshold, num_ties, found.num_ties - num_ties, kept.num_ids, kept.mass, bound, num_gathered)

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
        counts = self.memory.counts

        def count_block(block: Block, carry: jax.Array) -> jax.Array:
            is_tie = self.row.scale(self.memory.block(block)) == kept.threshold
            found = jnp.sum(jnp.where(is_tie, 1, 0), axis=1)
            counts[pl.ds(block.number * BLOCK, BLOCK)] = jnp.where(self.memory.is_used(block), found, 0)
            return carry + BLOCK

        num_slots = self.memory.for_blocks(kept.num_gathered, count_block, jnp.int32(0))
        plgpu.commit_smem()
        slots = iota(counts.shape[0])
        found = plgpu.load(counts, layout=plgpu.Layout.WG_STRIDED(counts.shape, vec_size=1))
        slot, before = _nth(jnp.where(slots < num_slots, found, 0), slots, kept.num_ties)
        tile = self.memory.slot_tile(kept.num_gathered, slot)
        is_tie = self.row.scale(self.memory.tile(tile)) == kept.threshold
        column, _ = _nth(jnp.where(is_tie, 1, 0), iota(TILE), kept.num_ties - before)
        return tile * TILE + column

    def draw(self, kept: Kept, last_tie: jax.Array) -> jax.Array:
        """The token."""
        row, memory, layout = self.row, self.memory, plgpu.Layout.WGMMA.reduce(1)

        def draw_block(block: Block, carry: tuple) -> tuple:
            scaled = row.scale(memory.block(block))
            tiles = memory.block_tiles(kept.num_gathered, block)
            shape = scaled.shape
            columns = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
            ids = lax.broadcast_in_dim(tiles * TILE, shape, [0]) + columns
            is_kept = (scaled > kept.threshold) | ((scaled == kept.threshold) & (ids <= last_tie))
            maxima = jnp.max(scaled, axis=1)
            maxima = jnp.where(maxima > LOWEST, maxima, np.float32(0))
            weights = jnp.exp2((scaled - lax.broadcast_in_dim(maxima, shape, [0])) * np.float32(LOG2E))
            sums = jnp.sum(jnp.where(is_kept, weights, np.float32(0)), axis=1)
            scores = maxima + jnp.log(sums) + gumbel(row.tile_words, tiles)
            is_better = memory.is_used(block) & (sums > 0) & (scores > carry[0])
            return jnp.where(is_better, scores, carry[0]), jnp.where(is_better, tiles, carry[1])

        none = plgpu.layout_cast(jnp.full((BLOCK,), -INF, jnp.float32), layout)
        no_tile = plgpu.layout_cast(jnp.full((BLOCK,), 0, jnp.int32), layout)
        scores, tiles = memory.for_blocks(kept.num_gathered, draw_block, (none, no_tile))
        tile = best_id(scores, tiles)
        logits = memory.tile(tile)
        scaled, ids = row.scale(logits), tile * TILE + iota(TILE)
        is_kept = (scaled > kept.threshold) | ((scaled == kept.threshold) & (ids <= last_tie))
        return best_id(jnp.where(is_kept, scaled + gumbel(row.id_words, ids), -INF), ids)


def _nth(counts: jax.Array, places: jax.Array, n: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(the first place up to which the counts sum to at least n, the sum before it)."""

    def sum_before(place: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(places < place, counts, 0))

    bits = (counts.shape[0] - 1).bit_length()

    def try_bit(i: jax.Array, place: jax.Array) -> jax.Array:
        candidate = place + (np.int32(1 << (bits - 1)) >> i)
        return jnp.where((candidate < counts.shape[0]) & (sum_before(candidate) < n), candidate, place)

    place = lax.fori_loop(0, bits, try_bit, jnp.int32(0))
    return place, sum_before(place)


def _cuts_kernel(
    tiles_ref: Any,  # [S, tiles, 128]
    maxima_ref: Any,  # [S, entries]
    sums_ref: Any,  # [S, entries]
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
        layout = entry_layout(shape)
        tiles, is_own = shape.tiles(iota(shape.num_entries))
        maxima = jnp.where(is_own, plgpu.load(maxima_ref.at[index], layout=layout), -INF)
        sums = plgpu.load(sums_ref.at[index], layout=layout)
        row = read_row(index, jnp.max(maxima), temperature_ref, seeds_ref, positions_ref)
        log_min_p, k, p = log_min_p_ref[index], top_k_ref[index], top_p_ref[index]
        memory = Memory(refs, tiles_ref, index, shape, params)
        cutter = Cutter(row, memory, (maxima, sums, tiles, is_own), params.capacity)

        def pick_uncut() -> jax.Array:
            tile = pick_tile(row, maxima, sums, tiles, is_own)
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
    maxima: jax.Array,
    sums: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    log_min_p: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    *,
    params: CutsParams,
) -> jax.Array:
    """The tokens, int32 [S], from logits float32 [S, tiles, 128] and what `reduce_tiles` made of them."""
    kernel = plgpu.kernel(
        functools.partial(_cuts_kernel, params=params),
        out_type=jax.ShapeDtypeStruct((tiles.shape[0],), jnp.int32),
        grid=(tiles.shape[0],),
        grid_names=("row",),
        kernel_name="sampling_cuts",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(tiles, maxima, sums, temperature, seeds, positions, log_min_p, top_k, top_p)
