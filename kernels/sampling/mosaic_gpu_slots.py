"""The plain program: reads the slots' state by slot and advances it in place, so that XLA adds no kernel of its own.

Two kernels, a pass over the logits and a choice for each row; or, `is_fused`, one, in which whichever CTA ends a row
chooses for it:

    CTA        0            1            2
    blocks     |0 1 2 3 4 5 | 6 7 8 9 10 | 11 ...        each CTA goes from its last block to its first
    rows       |-- 0 -|-- 1 ---|-- 2 --|
    row 1      CTA 0 and 1 each store what they know of its tiles, then count up; the second one chooses

Nobody waits for anybody. The counters return to zero with the last arrival.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import memref as memref_dialect

from jaxinfer.kernels.sampling.mosaic_gpu_common import TILE, RowShape, make_row
from jaxinfer.kernels.sampling.mosaic_gpu_pick import choose_token
from jaxinfer.kernels.sampling.mosaic_gpu_tiles import Shares, TilesParams, store_entries, stream_tiles
from jaxinfer.kernels.sampling.reference import Slots


class SlotRefs(NamedTuple):
    """References to a step's rows and to the slots' state."""

    slot_ids: Any  # [S]
    samples: Any  # [S]
    num_tokens: Any  # [S]
    temperature: Any  # [B]
    seeds: Any  # [B, 2]
    last_tokens: Any  # [B], written
    num_computed: Any  # [B], read and written

    def place(self, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(the row's slot, or some slot; whether it has one)."""
        slot, num_slots = self.slot_ids[row], self.temperature.shape[0]
        return jnp.minimum(slot, num_slots - 1), slot < num_slots

    def temperature_of(self, row: jax.Array) -> jax.Array:
        place, is_row = self.place(row)
        return jnp.where(is_row, self.temperature[place], np.float32(0))

    def advance(self, row: jax.Array, tiles_ref: Any, maxima_ref: Any, sums_ref: Any, out_ref: Any) -> None:
        """Chooses for a row whose tiles are all known."""
        place, is_row = self.place(row)
        position = self.num_computed[place] + self.num_tokens[row]
        low, high = self.seeds[place, 0], self.seeds[place, 1]
        make = functools.partial(make_row, row, self.temperature_of(row), low, high, position)
        token = choose_token(tiles_ref, row, maxima_ref, sums_ref, make)
        out_ref[row] = token

        @pl.when(is_row)
        def _() -> None:
            self.num_computed[place] = position

            @pl.when(self.samples[row])
            def _() -> None:
                self.last_tokens[place] = jnp.maximum(token, 0)


def _tiles_kernel(
    tiles_ref: Any,  # [S, tiles, 128]
    slot_ids_ref: Any,  # [S]
    temperature_ref: Any,  # [B]
    *out_refs: Any,  # [S, entries / 128, 128] each: maxima and sums
    num_stages: int,
) -> None:
    rows = SlotRefs(slot_ids_ref, None, None, temperature_ref, None, None, None)
    store = functools.partial(store_entries, out_refs)
    stream_tiles(tiles_ref, rows.temperature_of, store, num_stages=num_stages, with_seconds=False)


def _advance_kernel(
    tiles_ref: Any,  # [S, tiles, 128]
    maxima_ref: Any,  # [S, entries / 128, 128]
    sums_ref: Any,  # likewise
    *refs: Any,  # as `SlotRefs` has them; then out [S]
) -> None:
    rows, out_ref = SlotRefs(*refs[:-1]), refs[-1]
    rows.advance(lax.axis_index("row"), tiles_ref, maxima_ref, sums_ref, out_ref)


def _fused_kernel(
    tiles_ref: Any,  # [S, tiles, 128]
    counters_ref: Any,  # [S + 1]
    *refs: Any,  # as `SlotRefs` has them; then out [S]; maxima and sums [S, entries / 128, 128]
    params: TilesParams,
) -> None:
    rows, (out_ref, maxima_ref, sums_ref) = SlotRefs(*refs[:-3]), refs[-3:]
    shape = RowShape(tiles_ref.shape[1])
    shares = Shares(tiles_ref.shape[0], shape, lax.axis_size("cta"))
    cta = lax.axis_index("cta")

    @functools.partial(pl.run_scoped, order=plgpu.SMEM((1,), jnp.int32))
    def _scope(order: Any) -> None:
        def comes_last(row: jax.Array) -> jax.Array:
            """Whether all other CTAs that share the row have stored their part."""
            first = row * shape.num_blocks
            owner = shares.cta(first + shape.num_blocks - 1)
            if not params.counts_arrivals:
                return owner == cta
            others = owner - shares.cta(first)
            order[0] = jnp.int32(0)

            @pl.when(others > 0)
            def _() -> None:
                _arrive(counters_ref.at[pl.ds(row, 1)], order, others)

            return order[0] == others

        def store(row: jax.Array, block: jax.Array, values: Any) -> None:
            store_entries((maxima_ref, sums_ref), row, block, values)

            @pl.when((block == 0) | (row * shape.num_blocks + block == shares.first(cta)))
            def _() -> None:
                @pl.when(comes_last(row))
                def _() -> None:
                    rows.advance(row, tiles_ref, maxima_ref, sums_ref, out_ref)

        stream_tiles(tiles_ref, rows.temperature_of, store, num_stages=params.num_stages, with_seconds=False)


def _arrive(counter_ref: Any, order_ref: Any, others: jax.Array) -> None:
    """Count up to `others`, then from 0 again, and leave in shared memory what the counter was before.

    Releases what this warpgroup has written, and acquires what those before have.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def arrive(_, counter, order, others):
        mgpu_utils.warpgroup_barrier()
        with mgpu_utils.single_thread(scope=mgpu_utils.ThreadSubset.WARPGROUP):
            before = mgpu_utils.inline_ptx(
                "atom.acq_rel.gpu.global.inc.u32 $0, [$1], $2;",
                mgpu_utils.memref_ptr(counter),
                others.registers.item(),
                result_types=ir.IntegerType.get_signless(32),
                has_side_effects=True,
            )
            memref_dialect.store(before, order, [mgpu_utils.c(0, ir.IndexType.get())])
        mgpu_utils.warpgroup_barrier()

    arrive(counter_ref, order_ref, others)  # pyright: ignore[reportCallIssue]


def sample_and_advance(
    tiles: jax.Array, rows: tuple[jax.Array, ...], slots: Slots, *, params: TilesParams
) -> tuple[jax.Array, Slots]:
    """The tokens, int32 [S], and the slots, changed in place.

    Args:
      tiles: the logits, float32 [S, tiles, 128].
      rows: slot_ids, samples and num_tokens, [S] each.
    """
    num_rows, num_tiles, _ = tiles.shape
    shape = RowShape(num_tiles)
    known = jax.ShapeDtypeStruct((num_rows, shape.entry_rows, TILE), jnp.float32)
    out = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    num_ctas = params.num_ctas(num_rows * shape.num_blocks)
    last_tokens, num_computed = jax.new_ref(slots.last_tokens), jax.new_ref(slots.num_computed)
    refs = (*rows, slots.temperature, slots.seeds, last_tokens, num_computed)
    if params.is_fused:
        # A constant of the program; the last element keeps XLA from making it anew in each run.
        counters = jnp.asarray(np.arange(num_rows + 1) // num_rows, jnp.int32)
        body = functools.partial(_fused_kernel, params=params)
        tokens = _kernel(body, "sampling_slots", (out, known, known), cta=num_ctas)(tiles, counters, *refs)[0]
    else:
        body = functools.partial(_tiles_kernel, num_stages=params.num_stages)
        stream = _kernel(body, "sampling_slot_tiles", (known, known), cta=num_ctas)
        found = stream(tiles, rows[0], slots.temperature)
        tokens = _kernel(_advance_kernel, "sampling_slot_pick", out, row=num_rows)(tiles, *found, *refs)
    return tokens, slots._replace(last_tokens=jax.freeze(last_tokens), num_computed=jax.freeze(num_computed))


def _kernel(body: Callable[..., None], name: str, out_type: Any, **grid: int) -> Callable[..., Any]:
    return plgpu.kernel(
        body,
        out_type=out_type,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
