"""The plain program in one kernel: the pass over the logits, and the choice for each row by whichever CTA ends it.

    CTA        0            1            2
    blocks     |0 1 2 3 4 5 | 6 7 8 9 10 | 11 ...        each CTA goes from its last block to its first
    rows       |-- 0 -|-- 1 ---|-- 2 --|
    row 1      CTA 0 and 1 each store what they know of its tiles, then count up; the second one chooses

Nobody waits for anybody. The counters return to zero with the last arrival.
"""

from __future__ import annotations

import functools
from typing import Any

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


def _slots_kernel(
    tiles_ref: Any,  # [S, tiles, 128]
    slot_ids_ref: Any,  # [S]
    samples_ref: Any,  # [S]
    num_tokens_ref: Any,  # [S]
    temperature_ref: Any,  # [B]
    seeds_ref: Any,  # [B, 2]
    counters_ref: Any,  # [S + 1]
    last_tokens_ref: Any,  # [B], written
    num_computed_ref: Any,  # [B], read and written
    out_ref: Any,  # [S]
    maxima_ref: Any,  # [S, entries / 128, 128]
    sums_ref: Any,  # likewise
    *,
    params: TilesParams,
) -> None:
    num_slots = temperature_ref.shape[0]
    shape = RowShape(tiles_ref.shape[1])
    shares = Shares(tiles_ref.shape[0], shape, lax.axis_size("cta"))
    cta = lax.axis_index("cta")

    def temperature_of(row: jax.Array) -> jax.Array:
        slot = slot_ids_ref[row]
        return jnp.where(slot < num_slots, temperature_ref[jnp.minimum(slot, num_slots - 1)], np.float32(0))

    def advance(row: jax.Array) -> None:
        """Chooses for a row whose tiles are all known."""
        slot = slot_ids_ref[row]
        place = jnp.minimum(slot, num_slots - 1)
        position = num_computed_ref[place] + num_tokens_ref[row]
        low, high = seeds_ref[place, 0], seeds_ref[place, 1]
        make = functools.partial(make_row, row, temperature_of(row), low, high, position)
        token = choose_token(tiles_ref, row, maxima_ref, sums_ref, make)
        out_ref[row] = token

        @pl.when(slot < num_slots)
        def _() -> None:
            num_computed_ref[place] = position

            @pl.when(samples_ref[row])
            def _() -> None:
                last_tokens_ref[place] = jnp.maximum(token, 0)

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
                    advance(row)

        stream_tiles(tiles_ref, temperature_of, store, num_stages=params.num_stages, with_seconds=False)


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
    last_tokens, num_computed = jax.new_ref(slots.last_tokens), jax.new_ref(slots.num_computed)
    # A constant of the program; the last element keeps XLA from making it anew in each run.
    counters = jnp.asarray(np.arange(num_rows + 1) // num_rows, jnp.int32)
    kernel = plgpu.kernel(
        functools.partial(_slots_kernel, params=params),
        out_type=(jax.ShapeDtypeStruct((num_rows,), jnp.int32), known, known),
        grid=(params.num_ctas(num_rows * shape.num_blocks),),
        grid_names=("cta",),
        kernel_name="sampling_slots",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    tables = (slots.temperature, slots.seeds, counters, last_tokens, num_computed)
    tokens = kernel(tiles, *rows, *tables)[0]
    return tokens, slots._replace(last_tokens=jax.freeze(last_tokens), num_computed=jax.freeze(num_computed))
