"""How decode rows are cut over the CTAs of the decode kernel: the plan of a step, and a CTA's walk through it.

The work is the list of K/V tiles of every (row, kv head), laid end to end and cut into equal shares, one a
CTA (flash-decoding, split as in stream-K, arXiv 2301.03598). A CTA may begin inside one item and end inside
another, so ragged lengths, one long row and hundreds of short rows all keep every SM equally busy:

    item     (row 0, head 0)      (row 0, head 1)      (row 1, head 0) ...
    tiles    |0 1 2 3 4 5 6 7|    |0 1 2 3 4 5 6 7|    |0 1 2|
    CTA      |---- 0 ----|----- 1 -----|------ 2 ------|----- 3 ...
    order         b         a      b       a       b        a      a CTA runs its pieces from last to first

The CTA with an item's last tile owns the item: it waits for the other CTAs' partial results, merges them and
writes the output. The others ran that piece first and the owner runs it last, so the wait is short; owners
wait only for CTAs of lower number, which were started before them, so they cannot deadlock.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxinfer.kernels.paged_attention.mosaic_gpu_common import leading_decode_rows


@dataclasses.dataclass(frozen=True)
class DecodeParams:
    """Tuning of the decode kernel.

    block_kv: tokens a tile, a multiple of 64. num_stages: K and V tiles in flight a CTA.
    ctas_per_sm: CTAs meant to share an SM. min_share: tiles a CTA gets at least, so that short contexts are
    not cut into crumbs. num_sms: SMs of the device.
    keys_in_registers: fp8 keys go to the product without a second tile in shared memory, which the interpreter cannot.
    """

    block_kv: int = 64
    num_stages: int = 2
    ctas_per_sm: int = 2
    min_share: int = 1
    num_sms: int = 132
    keys_in_registers: bool = False

    def __post_init__(self) -> None:
        if self.block_kv % 64 or self.block_kv <= 0:
            raise ValueError(f"block_kv must be a positive multiple of 64, got {self.block_kv}")
        if self.num_stages < 2:
            raise ValueError(f"num_stages must be at least 2, got {self.num_stages}")

    @property
    def num_ctas(self) -> int:
        return self.num_sms * self.ctas_per_sm


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["row_info", "cta_work", "num_tokens", "arrivals"],
    meta_fields=["params", "num_kv_heads", "window"],
)
@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """How one step's decode rows are cut over CTAs; computed once a step, shared by every layer of a kind.

    row_info[S, 3]   tiles of one head, first tile, seq_len; zeros for rows that are not decode rows
    cta_work[C, 8]   where a CTA's share ends: row, kv head and tile (exclusive); how many tiles it has; that row's
                     row_info; tiles a full share. One line of the cache holds all that a CTA needs to begin.
    num_tokens[1]    real tokens in the batch
    arrivals[C]      zeros: counters of finished partial results by owning CTA, which every launch counts up
                     and leaves at zero again, so that no layer needs a kernel to clear them
    """

    row_info: jax.Array
    cta_work: jax.Array
    num_tokens: jax.Array
    arrivals: jax.Array
    params: DecodeParams
    num_kv_heads: int
    window: int | None


def plan_decode(
    seq_lens: jax.Array,  # [S] int32
    query_start_loc: jax.Array,  # [S + 1] int32
    *,
    num_kv_heads: int,
    window: int | None = None,
    params: DecodeParams = DecodeParams(),
) -> DecodePlan:
    """Cut the decode rows (the leading rows of exactly one token) into equal shares of K/V tiles."""
    seq_lens = jnp.where(leading_decode_rows(seq_lens, query_start_loc), seq_lens, 0)
    first_key = jnp.zeros_like(seq_lens) if window is None else jnp.maximum(seq_lens - window, 0)
    first_tile = first_key // params.block_kv
    num_tiles = pl.cdiv(seq_lens, params.block_kv) - first_tile

    row_end = jnp.cumsum(num_tiles * num_kv_heads)
    total = row_end[-1]
    share = jnp.maximum(pl.cdiv(total, params.num_ctas), params.min_share)
    begin = jnp.minimum(jnp.arange(params.num_ctas, dtype=jnp.int32) * share, total)
    count = jnp.minimum(total - begin, share)
    last = jnp.maximum(begin + count - 1, 0)
    row = jnp.sum(row_end[None, :] <= last[:, None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, seq_lens.shape[0] - 1)
    tiles = jnp.maximum(num_tiles[row], 1)
    offset = last - (row_end[row] - num_tiles[row] * num_kv_heads)
    row_info = jnp.stack([num_tiles, first_tile, seq_lens], axis=1).astype(jnp.int32)
    work = jnp.stack([row, offset // tiles, offset % tiles + 1, count], axis=1).astype(jnp.int32)
    shares = jnp.full((params.num_ctas, 1), share, jnp.int32)
    return DecodePlan(
        row_info=row_info,
        cta_work=jnp.concatenate([work, row_info[row], shares], axis=1),
        num_tokens=query_start_loc[-1:],
        arrivals=jnp.minimum(count, 0).astype(jnp.int32),
        params=params,
        num_kv_heads=num_kv_heads,
        window=window,
    )


@dataclasses.dataclass(frozen=True)
class Piece:
    """The tiles of one (row, kv head) that one CTA computes; every field is an int32 scalar."""

    index: jax.Array  # of this piece in its CTA
    step: jax.Array  # tiles the CTA has done before it
    row: jax.Array
    head: jax.Array
    seq_len: jax.Array
    tile: jax.Array  # first tile, counted from the row's start
    count: jax.Array
    before: jax.Array  # tiles of this item before the piece, in CTAs of lower number
    after: jax.Array  # tiles of this item after the piece; 0: this CTA owns the item
    share: jax.Array  # tiles a full share


def walk(cta_work_ref: Any, row_info_ref: Any, num_kv_heads: int, body: Callable[[Piece], None]):
    """Run `body` on every piece of this CTA, last to first; returns (tiles, pieces) done."""
    cta = lax.axis_index("cta")
    row, head, end, total, *info, share = (cta_work_ref[cta, i] for i in range(8))

    def step(state):
        index, row, head, done, (num_tiles, first_tile, seq_len) = state
        last = jnp.where(index == 0, end, num_tiles)
        count = jnp.minimum(last, total - done)
        before = last - count
        next_row = jnp.maximum(jnp.where(head == 0, row - 1, row), 0)
        next_info = tuple(row_info_ref[next_row, i] for i in range(3))  # on its way while the piece is computed
        body(Piece(index, done, row, head, seq_len, first_tile + before, count, before, num_tiles - last, share))
        return index + 1, next_row, jnp.where(head == 0, num_kv_heads - 1, head - 1), done + count, next_info

    init = (jnp.int32(0), row, head, jnp.int32(0), tuple(info))
    pieces, _, _, tiles, _ = lax.while_loop(lambda state: state[3] < total, step, init)
    return tiles, pieces
