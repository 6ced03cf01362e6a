"""The work list of the prefill kernel: query tiles, the order they are worked on, and who works on what.

An item is a query tile of one row for some query heads that share a KV head. Items are ordered for the L2 cache
first, then by falling cost, so that the last ones are short:

    section    rows that follow each other and whose keys and values fit the L2 cache together; of a longer row,
               as many KV heads as fit
    in it      tiles with the most keys first; the heads of a tile side by side

CTAs claim items one after the other from a counter in device memory, so an item's place in this order is about
its place in time: a section's keys are read from memory once.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxinfer.kernels.paged_attention.mosaic_gpu_common import TILE_ROWS, leading_decode_rows

CONSUMERS = 2  # warpgroups of a CTA that multiply
ROWS = 64  # query rows of a consumer: the M of a wgmma


@dataclasses.dataclass(frozen=True)
class PrefillParams:
    """Tuning of the prefill kernel.

    block_kv: keys a step, a multiple of 64. num_stages: K and V tiles in flight. q_buffers: query tiles in flight.
    cluster: CTAs that work on one item and share its K and V tiles, 1 or 2.
    take_turns: whether consumers alternate between products and softmax.
    q_in_registers: whether Q is an operand in registers, for which those of head_dim 112 and 256 do not suffice.
    section_keys: keys of one KV head that stay in the L2 cache.
    producer_registers: of 504 that it and the two consumers share, each thread; 24 to 152 in steps of 16.
    num_sms: SMs of the device.
    is_interpreted: for the interpreter, which knows neither a wgmma operand in registers nor the counter of claims.
    """

    block_kv: int = 128
    num_stages: int = 2
    q_buffers: int = 2
    cluster: int = 1
    take_turns: bool = True
    q_in_registers: bool = True
    section_keys: int = 98304
    producer_registers: int = 56
    num_sms: int = 132
    is_interpreted: bool = False

    def __post_init__(self) -> None:
        if self.block_kv % 64 or self.block_kv <= 0:
            raise ValueError(f"block_kv must be a positive multiple of 64, got {self.block_kv}")
        if self.num_stages < 2:
            raise ValueError(f"num_stages must be at least 2, got {self.num_stages}")
        if self.producer_registers not in range(24, 153, 16):
            raise ValueError(f"producer_registers must be 24, 40, ..., 152, got {self.producer_registers}")
        if self.cluster not in (1, 2):
            raise ValueError(f"cluster must be 1 or 2, got {self.cluster}")

    @property
    def ctas(self) -> int:
        """CTAs of an item; the interpreter cannot run clusters."""
        return 1 if self.is_interpreted else self.cluster

    def heads_per_item(self, group: int) -> int:
        """Query heads of an item: one for each consumer of a cluster, if the group divides like that."""
        return math.gcd(group, CONSUMERS * self.ctas)

    def buffer(self, i: jax.Array) -> jax.Array:
        """Which of the q_buffers item i has.

        Not a constant even if there is one: the compiler would keep, and spill, the addresses of its barriers.
        """
        return lax.rem(i, self.q_buffers) if self.q_buffers > 1 else jnp.minimum(i, 0)

    def tile_tokens(self, group: int) -> int:
        return ROWS * CONSUMERS * self.ctas // self.heads_per_item(group)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["tiles", "sections", "num_tiles"],
    meta_fields=["params", "num_kv_heads", "group", "window"],
)
@dataclasses.dataclass(frozen=True)
class PrefillPlan:
    """The query tiles of a step's prefill rows, in order; computed once a step, shared by the layers.

    tiles[max_tiles, 6]     row, first token (in the batch), the range [low, high) of the tile's rows that are this
                            row's tokens, position of the first token, seq_len
    sections[max_tiles, 3]  of each tile's section: its first tile, its number of tiles, KV heads worked on together
    num_tiles[2]            their number; items claimed, which is 0 except while a launch runs
    """

    tiles: jax.Array
    sections: jax.Array
    num_tiles: jax.Array
    params: PrefillParams
    num_kv_heads: int
    group: int
    window: int | None


def plan_prefill(
    seq_lens: jax.Array,  # [S] int32
    query_start_loc: jax.Array,  # [S + 1] int32
    *,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    window: int | None = None,
    params: PrefillParams = PrefillParams(),
) -> PrefillPlan:
    """Cut the rows after the decode rows into query tiles and put these in order."""
    group = num_heads // num_kv_heads
    tile_tokens = params.tile_tokens(group)
    num_new = jnp.where(leading_decode_rows(seq_lens, query_start_loc), 0, jnp.diff(query_start_loc))
    start = query_start_loc[:-1]
    lead = start % TILE_ROWS  # tokens of the row before that share its first swizzle tile
    num_tiles = jnp.where(num_new > 0, pl.cdiv(num_new + lead, tile_tokens), 0)
    tiles_end = jnp.cumsum(num_tiles)
    num_rows = seq_lens.shape[0]
    max_tiles = pl.cdiv(num_tokens, tile_tokens) + num_rows + pl.cdiv(num_rows, 8)

    index = jnp.arange(max_tiles, dtype=jnp.int32)
    row = jnp.sum(tiles_end[None, :] <= index[:, None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, num_rows - 1)
    offset = (index - tiles_end[row] + num_tiles[row]) * tile_tokens - lead[row]
    low, high = jnp.maximum(-offset, 0), jnp.clip(num_new[row] - offset, 0, tile_tokens)
    position = seq_lens[row] - num_new[row] + offset
    num_keys = position + high
    if window is not None:
        num_keys = jnp.minimum(num_keys, window + high - low)
    tiles = jnp.stack([row, start[row] + offset, low, high, position, seq_lens[row]], axis=1)

    row_keys = jnp.where(num_new > 0, seq_lens, 0)
    section = (jnp.cumsum(row_keys) - row_keys) // max(params.section_keys // num_kv_heads, 1)
    is_tile = index < tiles_end[-1]
    order = jnp.lexsort((-num_keys, jnp.where(is_tile, section[row], jnp.iinfo(jnp.int32).max)))
    return PrefillPlan(
        tiles=tiles[order].astype(jnp.int32),
        sections=_sections(section, row_keys, num_tiles, num_kv_heads, params)[row[order]].astype(jnp.int32),
        num_tiles=jnp.stack([tiles_end[-1], jnp.zeros_like(tiles_end[-1])]).astype(jnp.int32),
        params=params,
        num_kv_heads=num_kv_heads,
        group=group,
        window=window,
    )


def _sections(
    section: jax.Array,  # [S], nondecreasing
    row_keys: jax.Array,  # [S]
    num_tiles: jax.Array,  # [S]
    num_kv_heads: int,
    params: PrefillParams,
) -> jax.Array:
    """For each row its section's first tile, number of tiles, and number of KV heads that fit the L2 cache."""
    same = section[:, None] == section[None, :]
    before = section[:, None] > section[None, :]
    first = jnp.sum(jnp.where(before, num_tiles[None, :], 0), axis=1)
    count = jnp.sum(jnp.where(same, num_tiles[None, :], 0), axis=1)
    keys = jnp.sum(jnp.where(same, row_keys[None, :], 0), axis=1)
    heads = jnp.ones_like(keys)
    for divisor in range(2, num_kv_heads + 1):
        if num_kv_heads % divisor == 0:
            heads = jnp.where(keys <= params.section_keys // divisor, divisor, heads)
    return jnp.stack([first, count, heads], axis=1)
