"""What the Hopper sampling kernels share: how rows are cut, noise without log1p, and the lowest of equal maxima.

A row of V logits is V / 128 tiles, the two-level draw's. A block is 64 tiles; the last block of a row begins earlier
where 64 does not divide the tiles, so that no copy leaves the row:

    tiles      0 ....... 63 | 64 ...... 127 | 128 .. 150        151 tiles
    blocks     |---- 0 -----|----- 1 -------|
                                     |------ 2 -------|         87 .. 150
    entries    0 ....... 63 | 64 ...... 127 | 128 ...... 191    entries 128 .. 168 repeat tiles 87 .. 127

What is known of each tile is stored by entry: block after block, in the order of tiles, repeats to be ignored.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.sampling.noise import Stream, key_words, unit
from jaxinfer.kernels.sampling.reference import MIN_TEMPERATURE, TILE

BLOCK = 64
"""Tiles a block: the rows of a wgmma layout."""
MIN_VOCAB = BLOCK * TILE
LOG2E = math.log2(math.e)
NO_ID = np.int32(2**31 - 1)
INF = np.float32(np.inf)


@dataclasses.dataclass(frozen=True)
class RowShape:
    """How one row of logits is cut."""

    num_tiles: int

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tiles // BLOCK)

    @property
    def num_entries(self) -> int:
        """Entries, padded to what a warpgroup loads."""
        return -(-self.num_blocks * BLOCK // TILE) * TILE

    @property
    def shift(self) -> int:
        """By how much the last block begins earlier."""
        return self.num_blocks * BLOCK - self.num_tiles

    @property
    def entry_rows(self) -> int:
        return self.num_entries // TILE

    def first_tile(self, block: jax.Array) -> jax.Array:
        return jnp.minimum(block * BLOCK, self.num_tiles - BLOCK)

    def tiles(self, entries: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(tile, whether it is the tile's own entry) of entries, int32."""
        last = (self.num_blocks - 1) * BLOCK
        tile = jnp.where(entries < last, entries, entries - self.shift)
        is_own = (entries < last) | ((entries >= last + self.shift) & (entries < self.num_blocks * BLOCK))
        return tile, is_own


def strided(shape: tuple[int, ...]) -> Any:
    """The layout in which neighbours belong to neighbouring threads."""
    return plgpu.Layout.WG_STRIDED(shape, vec_size=1)


def iota(length: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (length,), 0, layout=strided((length,)))


class Entries(NamedTuple):
    """What is known of a row's tiles, by entry, [entries / 128, 128] each."""

    tiles: jax.Array  # int32
    is_own: jax.Array  # bool: the entry does not repeat an earlier one
    maxima: jax.Array  # float32, -inf where it does
    sums: jax.Array
    seconds: jax.Array | None = None


def read_entries(index: jax.Array, shape: RowShape, maxima_ref: Any, sums_ref: Any, *seconds_ref: Any) -> Entries:
    """From refs [S, entries / 128, 128]."""
    size = maxima_ref.shape[1:]
    row, column = (plgpu.broadcasted_iota(jnp.int32, size, axis, layout=strided(size)) for axis in (0, 1))
    tiles, is_own = shape.tiles(row * TILE + column)
    maxima, sums, *seconds = (
        plgpu.load(ref.at[index], layout=strided(size)) for ref in (maxima_ref, sums_ref, *seconds_ref)
    )
    return Entries(tiles, is_own, jnp.where(is_own, maxima, -INF), sums, *seconds)


def gumbel(words: tuple[jax.Array, jax.Array], indices: jax.Array) -> jax.Array:
    """`noise.gumbel` of one key: log1p(-w) as a series where w is small, since that is where the winners are."""
    w = unit(words[0], words[1], indices)
    series = w * (1 + w * (1 / 2 + w * (1 / 3 + w * (1 / 4 + w * (1 / 5 + w * (1 / 6 + w / 7))))))
    return -jnp.log(jnp.where(w < 0.0625, series, -jnp.log(1 - w)))


def best_id(scores: jax.Array, ids: jax.Array) -> jax.Array:
    """The lowest of the ids, int32, with the largest score."""
    return jnp.min(jnp.where(scores == jnp.max(scores), ids, NO_ID))


def divisor(temperature: jax.Array) -> jax.Array:
    return jnp.where(temperature > 0, jnp.maximum(temperature, np.float32(MIN_TEMPERATURE)), np.float32(1))


@dataclasses.dataclass(frozen=True)
class Row:
    """What the kernels know of the row they work on; scalars."""

    index: jax.Array
    temperature: jax.Array
    best: jax.Array  # the largest logit
    tile_words: tuple[jax.Array, jax.Array]
    id_words: tuple[jax.Array, jax.Array]

    @property
    def is_drawn(self) -> jax.Array:
        return self.temperature > 0

    def scale(self, logits: jax.Array) -> jax.Array:
        """(logits - best) / temperature, rounded as in the reference."""
        return (logits - self.best) / divisor(self.temperature)


def make_row(
    index: jax.Array, temperature: jax.Array, low: jax.Array, high: jax.Array, position: jax.Array, best: jax.Array
) -> Row:
    words = [key_words(low, high, position, stream) for stream in (Stream.TILE, Stream.SAMPLE)]
    return Row(index, temperature, best, words[0], words[1])


def read_row(index: jax.Array, best: jax.Array, temperature_ref: Any, seeds_ref: Any, positions_ref: Any) -> Row:
    return make_row(index, temperature_ref[index], seeds_ref[index, 0], seeds_ref[index, 1], positions_ref[index], best)


def is_finite(value: jax.Array) -> jax.Array:
    return jnp.abs(value) < INF
