"""The pass over the logits: of every tile of 128 its maximum, the sum of exp((x - maximum) / temperature), and for cuts
the second largest logit.

    CTA c      an equal share of all blocks of all rows, one after the other
    TMA        block i + num_stages -> shared memory, while block i is in registers
    warpgroup  64 tiles x 128 logits: a tile lies in four lanes, so a reduction is 31 steps in a lane and two shuffles

Bound: reading the logits once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.sampling.mosaic_gpu_common import BLOCK, LOG2E, TILE, RowShape, divisor, is_finite

PARTS, WIDTH = 4, TILE // 4  # a swizzled row of shared memory is 128 bytes


@dataclasses.dataclass(frozen=True)
class TilesParams:
    """Tuning: blocks of 32 KiB in flight a CTA, CTAs meant to share an SM, SMs of the device."""

    num_stages: int = 3
    ctas_per_sm: int = 2
    num_sms: int = 132

    def num_ctas(self, num_blocks: int) -> int:
        return min(num_blocks, self.num_sms * self.ctas_per_sm)


def _tiles_kernel(
    logits_ref: Any,  # [S, tiles, 128]
    temperature_ref: Any,  # [S], or [B] where there are slots
    *refs: Any,  # slot_ids [S] where there are any; maxima, sums and, where asked for, seconds, [S, entries] each
    num_stages: int,
    has_slots: bool,
) -> None:
    slots_ref, (maxima_ref, sums_ref, *seconds_ref) = refs[:has_slots], refs[has_slots:]
    num_rows, num_tiles, _ = logits_ref.shape
    shape = RowShape(num_tiles)
    total = num_rows * shape.num_blocks
    cta, num_ctas = lax.axis_index("cta"), lax.axis_size("cta")
    share, longer = divmod(total, num_ctas)  # the first CTAs have one block more
    first = cta * share + jnp.minimum(cta, longer)
    count = share + jnp.where(cta < longer, 1, 0)

    swizzle = plgpu.SwizzleTransform(4 * WIDTH)  # pyright: ignore[reportAbstractUsage]

    @functools.partial(
        pl.run_scoped,
        smem=plgpu.SMEM((num_stages, PARTS, BLOCK, WIDTH), jnp.float32, transforms=(swizzle,)),
        ready=plgpu.Barrier(num_arrivals=PARTS, num_barriers=num_stages),
    )
    def _scope(smem: Any, ready: Any) -> None:
        def load(i: jax.Array) -> None:
            row, block = (first + i) // shape.num_blocks, lax.rem(first + i, shape.num_blocks)
            slot = lax.rem(i, num_stages)
            tiles = pl.ds(shape.first_tile(block), BLOCK)
            for part in range(PARTS):
                source = logits_ref.at[row, tiles, pl.ds(part * WIDTH, WIDTH)]
                plgpu.copy_gmem_to_smem(source, smem.at[slot, part], ready.at[slot])

        for stage in range(num_stages):

            @pl.when(stage < count)
            def _() -> None:
                load(jnp.int32(stage))  # noqa: B023

        def reduce(i: jax.Array, _: None) -> None:
            slot = lax.rem(i, num_stages)
            plgpu.barrier_wait(ready.at[slot])
            parts = [plgpu.load(smem.at[slot, part], layout=plgpu.Layout.WGMMA) for part in range(PARTS)]
            plgpu.commit_smem()  # nobody still reads this stage

            @pl.when(i + num_stages < count)
            def _() -> None:
                load(i + num_stages)

            row, block = (first + i) // shape.num_blocks, lax.rem(first + i, shape.num_blocks)
            place = jnp.minimum(slots_ref[0][row], temperature_ref.shape[0] - 1) if slots_ref else row
            factor = np.float32(LOG2E) / divisor(temperature_ref[place])
            maxima = jnp.max(functools.reduce(jnp.maximum, parts), axis=1)
            safe = lax.broadcast_in_dim(jnp.where(is_finite(maxima), maxima, np.float32(0)), parts[0].shape, [0])
            weights = [jnp.exp2((x - safe) * factor) for x in parts]
            where = pl.ds(block * BLOCK, BLOCK)
            maxima_ref[row, where] = maxima
            sums_ref[row, where] = jnp.sum(functools.reduce(jnp.add, weights), axis=1)
            if seconds_ref:
                seconds_ref[0][row, where] = _second_largest(parts, maxima)

        lax.fori_loop(0, count, reduce, None)


def _second_largest(parts: list[jax.Array], maxima: jax.Array) -> jax.Array:
    """The second largest of each row of [64, 32] arrays side by side; the largest again where it is there twice."""
    first, second = jnp.maximum(parts[0], parts[1]), jnp.minimum(parts[0], parts[1])
    for part in parts[2:]:
        second, first = jnp.maximum(second, jnp.minimum(first, part)), jnp.maximum(first, part)
    is_largest = first == lax.broadcast_in_dim(maxima, first.shape, [0])
    others = jnp.max(jnp.where(is_largest, second, first), axis=1)
    return jnp.where(jnp.sum(jnp.where(is_largest, 1, 0), axis=1) > 1, maxima, others)


def reduce_tiles(
    tiles: jax.Array,
    temperature: jax.Array,
    slot_ids: jax.Array | None = None,
    *,
    params: TilesParams,
    with_seconds: bool = False,
) -> list[jax.Array]:
    """Of logits float32 [S, tiles, 128] the maxima and sums of tiles, float32 [S, entries] each; then the seconds.

    Entries behind the last block are undefined. With slot_ids, int32 [S], temperature is a table by slot.
    """
    num_rows, num_tiles, _ = tiles.shape
    shape = RowShape(num_tiles)
    out = jax.ShapeDtypeStruct((num_rows, shape.num_entries), jnp.float32)
    operands = [tiles, temperature] + ([] if slot_ids is None else [slot_ids])
    kernel = plgpu.kernel(
        functools.partial(_tiles_kernel, num_stages=params.num_stages, has_slots=slot_ids is not None),
        out_type=[out] * (3 if with_seconds else 2),
        grid=(params.num_ctas(num_rows * shape.num_blocks),),
        grid_names=("cta",),
        kernel_name="sampling_tiles",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(*operands)
