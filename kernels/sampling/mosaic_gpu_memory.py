"""A row's logits in shared memory: the tiles that matter, gathered, or block after block of the whole row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.sampling.mosaic_gpu_common import BLOCK, INF, NO_ID, TILE, RowShape

GROUP = 16  # tiles that are awaited together while gathering


@dataclasses.dataclass(frozen=True)
class CutsParams:
    """Tuning: blocks of 32 KiB of shared memory a CTA, for streaming or for gathered tiles, and the tiles that a pass
    takes at a time.
    """

    num_stages: int = 3
    slice_tiles: int = 4

    @property
    def capacity(self) -> int:
        """Tiles that can be gathered."""
        return self.num_stages * BLOCK


def scratch(shape: RowShape, params: CutsParams) -> dict[str, Any]:
    """What `Memory` needs of a CTA."""
    num_counts = max(shape.num_entries, pl.cdiv(params.capacity, 128) * 128)
    return {
        "logits": plgpu.SMEM((params.capacity, TILE), jnp.float32),
        "slot_tiles": plgpu.SMEM((params.capacity,), jnp.int32),
        "counts": plgpu.SMEM((num_counts,), jnp.int32),
        "gathered": plgpu.Barrier(num_arrivals=GROUP, num_barriers=params.capacity // GROUP),
        "streamed": plgpu.Barrier(num_barriers=params.num_stages),
    }


class Block(NamedTuple):
    """64 slots; those outside [low, high) are unused, or repeat tiles of the block before. Scalars."""

    number: jax.Array
    first: jax.Array  # slot in shared memory
    low: jax.Array
    high: jax.Array


class Memory:
    """A row's logits in shared memory: gathered tiles, or block after block of the whole row.

    Slots hold tiles in ascending order. `num_gathered` is the number of gathered tiles, 0 while streaming.
    """

    def __init__(self, refs: dict[str, Any], tiles_ref: Any, index: jax.Array, shape: RowShape, params: CutsParams):
        self._refs, self._tiles_ref, self._index, self._shape, self._params = refs, tiles_ref, index, shape, params
        self.counts = refs["counts"]

    def gather(self, is_active: jax.Array, tiles: jax.Array, count: jax.Array) -> None:
        """Copies the `count` active tiles, at least one; `is_active` and `tiles` are by entry."""
        logits, slot_tiles, ready = (self._refs[name] for name in ("logits", "slot_tiles", "gathered"))

        def add(slot: jax.Array, last: jax.Array) -> jax.Array:
            tile = -jnp.max(jnp.where(is_active & (tiles > last), -tiles, -NO_ID))
            slot_tiles[slot] = tile
            return tile

        last = lax.fori_loop(0, count, add, jnp.int32(-1))
        groups = pl.cdiv(count, GROUP)
        plgpu.commit_smem()

        def copy(group: jax.Array, _: None) -> None:
            for i in range(GROUP):
                slot = group * GROUP + i
                tile = jnp.where(slot < count, slot_tiles[slot], last)
                plgpu.copy_gmem_to_smem(self._tiles_ref.at[self._index, tile], logits.at[slot], ready.at[group])

        lax.fori_loop(0, groups, copy, None)

        def wait(group: jax.Array, _: None) -> None:
            plgpu.barrier_wait(ready.at[group])

        lax.fori_loop(0, groups, wait, None)
        self._clear(count, self._round_up(count))
        plgpu.commit_smem()

    def _round_up(self, slot: jax.Array) -> jax.Array:
        return pl.cdiv(slot, self._params.slice_tiles) * self._params.slice_tiles

    def _clear(self, first: jax.Array, end: jax.Array) -> None:
        def clear(slot: jax.Array, _: None) -> None:
            row = jnp.full((TILE,), -INF, jnp.float32)
            self._refs["logits"][slot] = plgpu.layout_cast(row, plgpu.Layout.WG_STRIDED((TILE,), vec_size=1))

        lax.fori_loop(first, end, clear, None)

    def for_blocks[C](self, num_gathered: jax.Array, body: Callable[[Block, C], C], init: C) -> C:
        """Carries `body(block, carry)` over all blocks, in the order of tiles."""
        shape, stages, ready = self._shape, self._params.num_stages, self._refs["streamed"]
        is_streaming = num_gathered == 0
        count = jnp.where(is_streaming, shape.num_blocks, pl.cdiv(num_gathered, BLOCK))

        def load(block: jax.Array) -> None:
            stage = lax.rem(block, stages)
            source = self._tiles_ref.at[self._index, pl.ds(shape.first_tile(block), BLOCK)]
            plgpu.copy_gmem_to_smem(source, self._refs["logits"].at[pl.ds(stage * BLOCK, BLOCK)], ready.at[stage])

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

            low = jnp.where(is_streaming & (number == shape.num_blocks - 1), shape.shift, 0)
            high = jnp.where(is_streaming, BLOCK, jnp.minimum(num_gathered - number * BLOCK, BLOCK))
            carry = body(Block(number, stage * BLOCK, low, high), carry)

            @pl.when(is_streaming & (number + stages < shape.num_blocks))
            def _() -> None:
                plgpu.commit_smem()
                load(number + stages)

            return carry

        return lax.fori_loop(0, count, step, init)

    def for_slices[C](self, num_gathered: jax.Array, body: Callable[[jax.Array, C], C], init: C) -> C:
        """Carries `body(logits [slice, 128], carry)` over everything once; what a slice has too much is -inf."""
        size, layout = self._params.slice_tiles, self._slice_layout

        def over_block(block: Block, carry: C) -> C:
            first = block.low // size
            if self._shape.shift % size:

                @pl.when(block.low > 0)
                def _() -> None:
                    self._clear(block.first + first * size, block.first + block.low)
                    plgpu.commit_smem()

            def over_slice(i: jax.Array, carry: C) -> C:
                where = pl.ds(block.first + i * size, size)
                return body(plgpu.load(self._refs["logits"].at[where], layout=layout), carry)

            return lax.fori_loop(first, pl.cdiv(block.high, size), over_slice, carry)

        return self.for_blocks(num_gathered, over_block, init)

    @property
    def _slice_layout(self) -> Any:
        return plgpu.Layout.WG_STRIDED((self._params.slice_tiles, TILE), vec_size=4)

    def full_slice(self, value: Any, dtype: Any) -> jax.Array:
        return plgpu.layout_cast(jnp.full((self._params.slice_tiles, TILE), value, dtype), self._slice_layout)

    def block(self, block: Block) -> jax.Array:
        """A block's logits, [64, 128]."""
        where = pl.ds(block.first, BLOCK)
        return plgpu.load(self._refs["logits"].at[where], layout=plgpu.Layout.WGMMA, optimized=False)

    def is_used(self, block: Block) -> jax.Array:
        """Which of a block's slots count, bool [64]."""
        slots = plgpu.broadcasted_iota(jnp.int32, (BLOCK,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        return (slots >= block.low) & (slots < block.high)

    def tile(self, tile: jax.Array) -> jax.Array:
        """A tile, [128], from device memory."""
        tile = jnp.clip(tile, 0, self._shape.num_tiles - 1)
        return plgpu.load(self._tiles_ref.at[self._index, tile], layout=plgpu.Layout.WG_STRIDED((TILE,), vec_size=1))

    def block_tiles(self, num_gathered: jax.Array, block: Block) -> jax.Array:
        """Which tiles a block holds, int32 [64]; anything for unused slots."""
        layout = plgpu.Layout.WGMMA.reduce(1)
        gathered = plgpu.load(self._refs["slot_tiles"].at[pl.ds(block.first, BLOCK)], layout=layout, optimized=False)
        streamed = self._shape.first_tile(block.number) + plgpu.broadcasted_iota(jnp.int32, (BLOCK,), 0, layout=layout)
        return jnp.where(num_gathered == 0, streamed, gathered)

    def slot_tile(self, num_gathered: jax.Array, slot: jax.Array) -> jax.Array:
        """The tile in the slot-th place of all blocks."""
        gathered = self._refs["slot_tiles"][jnp.minimum(slot, self._params.capacity - 1)]
        return jnp.where(num_gathered == 0, self._shape.tiles(slot)[0], gathered)
