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
from collections.abc import Callable, Sequence
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
    """Tuning: blocks of 32 KiB in flight a CTA, CTAs meant to share an SM, SMs of the device.

    is_fused: the plain program is one kernel.
    counts_arrivals: in it, CTAs that share a row count up who comes last. Without, as in the interpreter, which knows
      no atomics, CTAs must run one after the other.
    """

    num_stages: int = 3
    ctas_per_sm: int = 2
    num_sms: int = 132
    is_fused: bool = False
    counts_arrivals: bool = True

    def num_ctas(self, num_blocks: int) -> int:
        return min(num_blocks, self.num_sms * self.ctas_per_sm)


class Shares:
    """All blocks of all rows, cut into equal shares, one a CTA; the first ones have one block more."""

    def __init__(self, num_rows: int, shape: RowShape, num_ctas: int):
        self.shape = shape
        self._share, self._longer = divmod(num_rows * shape.num_blocks, num_ctas)

    def first(self, cta: jax.Array) -> jax.Array:
        return cta * self._share + jnp.minimum(cta, self._longer)

    def count(self, cta: jax.Array) -> jax.Array:
        return self._share + jnp.where(cta < self._longer, 1, 0)

    def place(self, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(row, block in the row) of a block."""
        return number // self.shape.num_blocks, lax.rem(number, self.shape.num_blocks)

    def cta(self, number: jax.Array) -> jax.Array:
        """Which CTA has a block."""
        in_longer = self._longer * (self._share + 1)
        return jnp.where(
            number < in_longer,
            number // (self._share + 1),
            self._longer + (jnp.maximum(number, in_longer) - in_longer) // self._share,
        )


def stream_tiles(
    logits_ref: Any,  # [S, tiles, 128]
    temperature_of: Callable[[jax.Array], jax.Array],
    store: Callable[[jax.Array, jax.Array, Sequence[jax.Array]], None],
    *,
    num_stages: int,
    with_seconds: bool,
) -> None:
    """Calls `store(row, block, maxima, sums and seconds)`, float32 [64] each, for each block of a CTA's share.

    From last to first: what another CTA may wait for comes first.
    """
    num_rows, num_tiles, _ = logits_ref.shape
    shape = RowShape(num_tiles)
    shares = Shares(num_rows, shape, lax.axis_size("cta"))
    cta = lax.axis_index("cta")
    count = shares.count(cta)
    last = shares.first(cta) + count - 1
    swizzle = plgpu.SwizzleTransform(4 * WIDTH)  # pyright: ignore[reportAbstractUsage]

    @functools.partial(
        pl.run_scoped,
        smem=plgpu.SMEM((num_stages, PARTS, BLOCK, WIDTH), jnp.float32, transforms=(swizzle,)),
        ready=plgpu.Barrier(num_arrivals=PARTS, num_barriers=num_stages),
    )
    def _scope(smem: Any, ready: Any) -> None:
        def load(i: jax.Array) -> None:
            row, block = shares.place(last - i)
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

            row, block = shares.place(last - i)
            factor = np.float32(LOG2E) / divisor(temperature_of(row))
            maxima = jnp.max(functools.reduce(jnp.maximum, parts), axis=1)
            safe = lax.broadcast_in_dim(jnp.where(is_finite(maxima), maxima, np.float32(0)), parts[0].shape, [0])
            sums = jnp.sum(functools.reduce(jnp.add, [jnp.exp2((x - safe) * factor) for x in parts]), axis=1)
            store(row, block, [maxima, sums, *([_second_largest(parts, maxima)] if with_seconds else [])])

        lax.fori_loop(0, count, reduce, None)


def store_entries(refs: Sequence[Any], row: jax.Array, block: jax.Array, values: Sequence[jax.Array]) -> None:
    """Stores a block's [64] values by entry, to refs [S, entries / 128, 128]."""
    where = pl.ds(lax.rem(block, TILE // BLOCK) * BLOCK, BLOCK)
    for ref, value in zip(refs, values, strict=True):
        ref[row, block // (TILE // BLOCK), where] = value


def _tiles_kernel(
    logits_ref: Any,  # [S, tiles, 128]
    temperature_ref: Any,  # [S]
    *out_refs: Any,  # [S, entries / 128, 128] each: maxima, sums, and seconds where asked for
    num_stages: int,
) -> None:
    stream_tiles(
        logits_ref,
        lambda row: temperature_ref[row],
        functools.partial(store_entries, out_refs),
        num_stages=num_stages,
        with_seconds=len(out_refs) == 3,
    )


def _second_largest(parts: list[jax.Array], maxima: jax.Array) -> jax.Array:
    """The second largest of each row of [64, 32] arrays side by side; the largest again where it is there twice."""
    first, second = jnp.maximum(parts[0], parts[1]), jnp.minimum(parts[0], parts[1])
    for part in parts[2:]:
        second, first = jnp.maximum(second, jnp.minimum(first, part)), jnp.maximum(first, part)
    is_largest = first == lax.broadcast_in_dim(maxima, first.shape, [0])
    others = jnp.max(jnp.where(is_largest, second, first), axis=1)
    return jnp.where(jnp.sum(jnp.where(is_largest, 1, 0), axis=1) > 1, maxima, others)


def reduce_tiles(
    tiles: jax.Array, temperature: jax.Array, *, params: TilesParams, with_seconds: bool = False
) -> list[jax.Array]:
    """Of logits float32 [S, tiles, 128] the maxima and sums of tiles, and the seconds, by entry.

    Each is float32 [S, entries / 128, 128]; entries behind the last block are undefined.
    """
    num_rows, num_tiles, _ = tiles.shape
    shape = RowShape(num_tiles)
    out = jax.ShapeDtypeStruct((num_rows, shape.entry_rows, TILE), jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_tiles_kernel, num_stages=params.num_stages),
        out_type=[out] * (3 if with_seconds else 2),
        grid=(params.num_ctas(num_rows * shape.num_blocks),),
        grid_names=("cta",),
        kernel_name="sampling_tiles",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(tiles, temperature)
