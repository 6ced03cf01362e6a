"""A row's logits in shared memory: what matters of them, gathered, or block after block of the whole row.

Which logits can reach a bound is known from each tile's two largest ones:

    second < bound     shallow: its maximum alone, at most
    second >= bound    deep: perhaps more, so the tile is copied

    slots    | maxima of shallow tiles, 128 a slot | deep tiles, ascending |
             0                            entry_rows               num_slots

Streaming (num_slots is -1), the slots are the row's tiles, ascending, a block of 64 at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.sampling.mosaic_gpu_common import BLOCK, INF, NO_ID, TILE, Entries, RowShape, strided

STREAMING = np.int32(-1)


@dataclasses.dataclass(frozen=True)
class CutsParams:
    """Tuning: blocks of 32 KiB of shared memory a CTA, and the tiles that a pass takes at a time."""

    num_stages: int = 3
    slice_tiles: int = 4

    @property
    def num_slots(self) -> int:
        return self.num_stages * BLOCK

    @property
    def group_tiles(self) -> int:
        """Tiles that are awaited together while gathering: there are at most 32 barriers for it."""
        return 8 if self.num_slots <= 256 else 16


def scratch(shape: RowShape, params: CutsParams) -> dict[str, Any]:
    """What `Memory` needs of a CTA."""
    num_counts = max(shape.num_entries, -(-params.num_slots // TILE) * TILE)
    return {
        "logits": plgpu.SMEM((params.num_slots, TILE), jnp.float32),
        "slot_tiles": plgpu.SMEM((num_counts,), jnp.int32),
        "counts": plgpu.SMEM((num_counts,), jnp.int32),
        "gathered": plgpu.Barrier(num_arrivals=params.group_tiles, num_barriers=params.num_slots // params.group_tiles),
        "streamed": plgpu.Barrier(num_barriers=params.num_stages),
    }


class Block(NamedTuple):
    """64 slots; those outside [low, high) are unused, or repeat tiles of the block before. Scalars."""

    number: jax.Array
    first: jax.Array  # slot in shared memory
    low: jax.Array
    high: jax.Array


class Memory:
    """See above."""

    def __init__(self, refs: dict[str, Any], tiles_ref: Any, index: jax.Array, shape: RowShape, params: CutsParams):
        self._refs, self._tiles_ref, self._index, self._shape, self._params = refs, tiles_ref, index, shape, params
        self._logits, self.num_tiles = refs["logits"], shape.num_tiles

    def tile(self, tile: jax.Array) -> jax.Array:
        """A tile, [128], from device memory."""
        tile = jnp.clip(tile, 0, self._shape.num_tiles - 1)
        return plgpu.load(self._tiles_ref.at[self._index, tile], layout=strided((TILE,)))

    # -- gathering ------------------------------------------------------------------------------------

    @property
    def capacity(self) -> int:
        """Deep tiles that fit, in whole groups."""
        size = self._params.group_tiles
        return (self._params.num_slots - self._shape.entry_rows) // size * size

    def gather(self, entries: Entries, is_deep: jax.Array, count: jax.Array) -> None:
        """Copies the `count` deep tiles and the maxima of the others."""
        slot_tiles, ready, first = self._refs["slot_tiles"], self._refs["gathered"], self._shape.entry_rows
        self._logits[pl.ds(0, first)] = jnp.where(is_deep, -INF, entries.maxima)

        def add(i: jax.Array, last: jax.Array) -> jax.Array:
            tile = -jnp.max(jnp.where(is_deep & (entries.tiles > last), -entries.tiles, -NO_ID))
            slot_tiles[first + i] = tile
            return tile

        last = lax.fori_loop(0, count, add, jnp.int32(-1))
        plgpu.commit_smem()

        def copy(group: jax.Array, _: None) -> None:
            for i in range(size):
                number = group * size + i
                tile = jnp.where(number < count, slot_tiles[first + number], last)
                source = self._tiles_ref.at[self._index, tile]
                plgpu.copy_gmem_to_smem(source, self._logits.at[first + number], ready.at[group])

        def wait(group: jax.Array, _: None) -> None:
            plgpu.barrier_wait(ready.at[group])

        size = self._params.group_tiles
        groups = pl.cdiv(count, size)
        lax.fori_loop(0, groups, copy, None)
        lax.fori_loop(0, groups, wait, None)
        self._clear(first + count, pl.cdiv(first + count, self._params.slice_tiles) * self._params.slice_tiles)
        plgpu.commit_smem()

    def shallow(self, num_slots: jax.Array) -> jax.Array:
        """By entry the maxima of shallow tiles, -inf elsewhere and while streaming."""
        size = (self._shape.entry_rows, TILE)
        maxima = plgpu.load(self._logits.at[pl.ds(0, size[0])], layout=strided(size))
        return jnp.where(num_slots < 0, -INF, maxima)

    def _clear(self, first: jax.Array, end: jax.Array) -> None:
        def clear(slot: jax.Array, _: None) -> None:
            self._logits[slot] = plgpu.layout_cast(jnp.full((TILE,), -INF, jnp.float32), strided((TILE,)))

        lax.fori_loop(first, end, clear, None)

    # -- passes ---------------------------------------------------------------------------------------

    def for_blocks[C](
        self, num_slots: jax.Array, body: Callable[[Block, C], C], init: C, *, only_tiles: bool = True
    ) -> C:
        """Carries `body(block, carry)` over all blocks, in the order of tiles.

        Args:
          only_tiles: leave out the maxima of shallow tiles.
        """
        shape, stages, ready = self._shape, self._params.num_stages, self._refs["streamed"]
        is_streaming = num_slots < 0
        gathered = pl.cdiv(num_slots, BLOCK)
        if only_tiles:
            gathered = jnp.where(num_slots > shape.entry_rows, gathered, 0)

        def load(block: jax.Array) -> None:
            stage = lax.rem(block, stages)
            source = self._tiles_ref.at[self._index, pl.ds(shape.first_tile(block), BLOCK)]
            plgpu.copy_gmem_to_smem(source, self._logits.at[pl.ds(stage * BLOCK, BLOCK)], ready.at[stage])

        @pl.when(is_streaming)
        def _() -> None:
            plgpu.commit_smem()
            for block in range(min(stages, shape.num_blocks)):
                load(jnp.int32(block))

        def step(number: jax.Array, carry: C) -> C:
            stage = lax.rem(number, stages)

            @pl.when(is_streaming)
            def _() -> None:
                plgpu.barrier_wait(ready.at[stage])

            repeats = jnp.where(number == shape.num_blocks - 1, shape.shift, 0)
            others = jnp.where(number == 0, shape.entry_rows, 0) if only_tiles else 0
            low = jnp.where(is_streaming, repeats, others)
            high = jnp.where(is_streaming, BLOCK, jnp.minimum(num_slots - number * BLOCK, BLOCK))
            carry = body(Block(number, stage * BLOCK, low, high), carry)

            @pl.when(is_streaming & (number + stages < shape.num_blocks))
            def _() -> None:
                plgpu.commit_smem()
                load(number + stages)

            return carry

        return lax.fori_loop(0, jnp.where(is_streaming, shape.num_blocks, gathered), step, init)

    def for_slices[C](self, num_slots: jax.Array, body: Callable[[jax.Array, C], C], init: C) -> C:
        """Carries `body(logits [slice, 128], carry)` over everything once; what a slice has too much is -inf."""
        size = self._params.slice_tiles

        def over_block(block: Block, carry: C) -> C:
            first = block.low // size
            if self._shape.shift % size:

                @pl.when(block.low > 0)
                def _() -> None:
                    self._clear(block.first + first * size, block.first + block.low)
                    plgpu.commit_smem()

            def over_slice(i: jax.Array, carry: C) -> C:
                where = pl.ds(block.first + i * size, size)
                return body(plgpu.load(self._logits.at[where], layout=self._slice_layout), carry)

            return lax.fori_loop(first, pl.cdiv(block.high, size), over_slice, carry)

        return self.for_blocks(num_slots, over_block, init, only_tiles=False)

    @property
    def _slice_layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self._params.slice_tiles, TILE), vec_size=4)

    def full_slice(self, value: Any, dtype: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full((self._params.slice_tiles, TILE), value, dtype), self._slice_layout)

    # -- blocks ---------------------------------------------------------------------------------------

    def block(self, block: Block) -> jax.Array:
        """A block's logits, [64, 128]."""
        where = pl.ds(block.first, BLOCK)
        return plgpu.load(self._logits.at[where], layout=plgpu.Layout.WGMMA, optimized=False)

    def is_used(self, block: Block) -> jax.Array:
        """Which of a block's slots count, bool [64]."""
        slots = plgpu.broadcasted_iota(jnp.int32, (BLOCK,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        return (slots >= block.low) & (slots < block.high)

    def block_tiles(self, num_slots: jax.Array, block: Block) -> jax.Array:
        """Which tiles a block holds, int32 [64]; anything for unused slots."""
        layout = plgpu.Layout.WGMMA.reduce(1)
        gathered = plgpu.load(self._refs["slot_tiles"].at[pl.ds(block.first, BLOCK)], layout=layout, optimized=False)
        streamed = self._shape.first_tile(block.number) + plgpu.broadcasted_iota(jnp.int32, (BLOCK,), 0, layout=layout)
        return jnp.where(num_slots < 0, streamed, gathered)

    def count_by_slot(
        self, num_slots: jax.Array, holds: Callable[[jax.Array], jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """(tiles, how many of their logits hold), int32 [n] each; the shallow ones are not among them."""
        counts, slot_tiles = self._refs["counts"], self._refs["slot_tiles"]

        def count_block(block: Block, written: jax.Array) -> jax.Array:
            found = jnp.sum(jnp.where(holds(self.block(block)), 1, 0), axis=1)
            counts[pl.ds(block.number * BLOCK, BLOCK)] = jnp.where(self.is_used(block), found, 0)
            return written + BLOCK

        written = self.for_blocks(num_slots, count_block, jnp.int32(0))
        plgpu.commit_smem()
        slots = plgpu.broadcasted_iota(jnp.int32, counts.shape, 0, layout=strided(counts.shape))
        gathered = plgpu.load(slot_tiles, layout=strided(counts.shape))
        tiles = jnp.where(num_slots < 0, self._shape.tiles(slots)[0], gathered)
        return tiles, jnp.where(slots < written, plgpu.load(counts, layout=strided(counts.shape)), 0)
