"""Paged decode attention for Hopper: one query token a row, K and V read exactly once, one kernel.

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

Inside a CTA, two warpgroups and a ring of `num_stages` K and V tiles in shared memory:

    producer   page id -> TMA K[s] -> TMA V[s] -> page id -> ...        waits on k_free[s], v_free[s]
                     |           |
                 k_ready[s]  v_ready[s]
                     v           v
    consumer   S' = K Q'  -> mask, online softmax over rows of S' -> P in SMEM -> O' += V' P

Everything is computed transposed (' is a transpose): tokens are the M of the first product and head_dim the M
of the second, so the few query heads of a group are a wgmma N of 8, not an M padded to 64.

The bound is device memory: 2 * tokens * kv_heads * head_dim * itemsize bytes over the reading rate.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.paged_attention.mosaic_gpu_common import (
    LOG2E,
    NEG_INF,
    TILE_ROWS,
    leading_decode_rows,
    pad_rows,
    swizzled_smem,
    zero_rows_outside,
)

MIN_GROUP = 8  # smallest wgmma N
MERGE_UNROLL = 4  # partial results in flight while merging


@dataclasses.dataclass(frozen=True)
class DecodeParams:
    """Tuning of the decode kernel.

    block_kv: tokens a tile, a multiple of 64. num_stages: K and V tiles in flight a CTA.
    ctas_per_sm: CTAs meant to share an SM. min_share: tiles a CTA gets at least, so that short contexts are
    not cut into crumbs. num_sms: SMs of the device.
    """

    block_kv: int = 64
    num_stages: int = 2
    ctas_per_sm: int = 2
    min_share: int = 1
    num_sms: int = 132

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
    data_fields=["row_info", "cta_work", "share", "num_tokens", "arrivals"],
    meta_fields=["params", "num_kv_heads", "window"],
)
@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """How one step's decode rows are cut over CTAs; computed once a step, shared by every layer of a kind.

    row_info[S, 3]   tiles of one head, first tile, seq_len; zeros for rows that are not decode rows
    cta_work[C, 4]   row, kv head and tile (exclusive) where a CTA's share ends, and how many tiles it has
    share[1]         tiles a CTA
    num_tokens[1]    real tokens in the batch
    arrivals[C]      zeros: counters of finished partial results by owning CTA, which every launch counts up
                     and leaves at zero again, so that no layer needs a kernel to clear them
    """

    row_info: jax.Array
    cta_work: jax.Array
    share: jax.Array
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
    cta_work = jnp.stack([row, offset // tiles, offset % tiles + 1, count], axis=1)
    return DecodePlan(
        row_info=jnp.stack([num_tiles, first_tile, seq_lens], axis=1),
        cta_work=cta_work.astype(jnp.int32),
        share=share.reshape(1).astype(jnp.int32),
        num_tokens=query_start_loc[-1:],
        arrivals=jnp.minimum(count, 0).astype(jnp.int32),
        params=params,
        num_kv_heads=num_kv_heads,
        window=window,
    )


@dataclasses.dataclass(frozen=True)
class _Piece:
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


def _walk(cta_work_ref: Any, row_info_ref: Any, num_kv_heads: int, body: Callable[[_Piece], None]):
    """Run `body` on every piece of this CTA, last to first; returns (tiles, pieces) done."""
    cta = lax.axis_index("cta")
    row, head, end, total = (cta_work_ref[cta, i] for i in range(4))

    def step(state):
        index, row, head, done = state
        num_tiles, first_tile, seq_len = (row_info_ref[row, i] for i in range(3))
        last = jnp.where(index == 0, end, num_tiles)
        count = jnp.minimum(last, total - done)
        before = last - count
        body(_Piece(index, done, row, head, seq_len, first_tile + before, count, before, num_tiles - last))
        row = jnp.maximum(jnp.where(head == 0, row - 1, row), 0)
        return index + 1, row, jnp.where(head == 0, num_kv_heads - 1, head - 1), done + count

    init = (jnp.int32(0), row, head, jnp.int32(0))
    pieces, _, _, tiles = lax.while_loop(lambda state: state[3] < total, step, init)
    return tiles, pieces


def _arrive(counter_ref: Any) -> None:
    """Add 1 to a counter in device memory, after everything this warpgroup has written."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def arrive(_, counter):
        mgpu_utils.warpgroup_barrier()
        mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(counter)).signal(1, memory_scope="gpu")

    arrive(counter_ref)


def _await(counter_ref: Any, value: jax.Array) -> None:
    """Wait until a counter in device memory is `value`, and set it back to 0."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def wait(_, counter, value):
        semaphore = mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(counter))
        semaphore.wait(value.registers.item(), memory_scope="gpu")

    wait(counter_ref, value)


def _decode_kernel(
    q_ref,  # [T * KVH * q_stride, D]
    k_ref,  # [N, KVH, BS, D]
    v_ref,  # [N, KVH, BS, D]
    block_tables_ref,  # [S, M]
    row_info_ref,  # [S, 3]
    cta_work_ref,  # [C, 4]
    share_ref,  # [1]
    num_tokens_ref,  # [1]
    arrivals_ref,  # [C]
    *refs,  # sinks [KVH, padded group] where there are any; then the outputs
    group: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    params: DecodeParams,
):
    *sinks_ref, out_ref, part_out_ref, part_max_ref, part_sum_ref = refs
    _, num_kv_heads, block_size, head_dim = k_ref.shape
    block_kv, stages = params.block_kv, params.num_stages
    padded_group = part_out_ref.shape[-1]
    # Groups that would straddle the swizzle tiles of a TMA copy come padded.
    q_stride = padded_group if group % TILE_ROWS and TILE_ROWS % group else group
    copy_tokens = min(block_size, block_kv)
    num_copies = block_kv // copy_tokens
    scores_shape, out_shape = (block_kv, padded_group), (head_dim, padded_group)
    cta = lax.axis_index("cta")

    @functools.partial(
        pl.run_scoped,
        q_smem=swizzled_smem((2, padded_group, head_dim), q_ref.dtype),
        k_smem=swizzled_smem((stages, block_kv, head_dim), k_ref.dtype),
        v_smem=swizzled_smem((stages, block_kv, head_dim), v_ref.dtype),
        p_smem=swizzled_smem((padded_group, block_kv), v_ref.dtype),
        o_smem=plgpu.SMEM((padded_group, head_dim), out_ref.dtype),
        q_ready=plgpu.Barrier(num_barriers=2),
        k_ready=plgpu.Barrier(num_arrivals=num_copies, num_barriers=stages),
        v_ready=plgpu.Barrier(num_arrivals=num_copies, num_barriers=stages),
        q_free=plgpu.Barrier(num_barriers=2),
        k_free=plgpu.Barrier(num_barriers=stages),
        v_free=plgpu.Barrier(num_barriers=stages),
        collective_axes="wg",
    )
    def _scope(q_smem, k_smem, v_smem, p_smem, o_smem, q_ready, k_ready, v_ready, q_free, k_free, v_free):
        wg = lax.axis_index("wg")

        @pl.when(wg == 1)
        def _producer():
            def page_ids(piece, tile):
                """Block ids of a tile's copies; past the row's end its last real block again."""
                last = (piece.seq_len - 1) // block_size
                blocks = [(tile * block_kv + i * copy_tokens) // block_size for i in range(num_copies)]
                return tuple(block_tables_ref[piece.row, jnp.minimum(b, last)] for b in blocks)

            def load_piece(piece):
                q_slot = lax.rem(piece.index, 2)

                @pl.when(piece.index >= 2)
                def _():
                    plgpu.barrier_wait(q_free.at[q_slot])

                q_row = (piece.row * num_kv_heads + piece.head) * q_stride
                plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(q_row, padded_group)], q_smem.at[q_slot], q_ready.at[q_slot])

                def load_tile(i, pages):
                    slot = lax.rem(piece.step + i, stages)
                    next_pages = page_ids(piece, piece.tile + jnp.minimum(i + 1, piece.count - 1))
                    offset = lax.rem((piece.tile + i) * block_kv, block_size) if block_size > block_kv else 0
                    for source, smem, ready, free in (
                        (k_ref, k_smem, k_ready, k_free),
                        (v_ref, v_smem, v_ready, v_free),
                    ):

                        @pl.when(piece.step + i >= stages)
                        def _(free=free):
                            plgpu.barrier_wait(free.at[slot])

                        for c, page in enumerate(pages):
                            plgpu.copy_gmem_to_smem(
                                source.at[page, piece.head, pl.ds(offset, copy_tokens)],
                                smem.at[slot, pl.ds(c * copy_tokens, copy_tokens)],
                                ready.at[slot],
                            )
                    return next_pages

                lax.fori_loop(0, piece.count, load_tile, page_ids(piece, piece.tile))

            tiles, pieces = _walk(cta_work_ref, row_info_ref, num_kv_heads, load_piece)

            def drain(count, depth, *barriers):
                def wait(i, _):
                    for barrier in barriers:
                        plgpu.barrier_wait(barrier.at[lax.rem(i, depth)])

                lax.fori_loop(jnp.maximum(count - depth, 0), count, wait, None)

            drain(tiles, stages, k_free, v_free)
            drain(pieces, 2, q_free)

        @pl.when(wg == 0)
        def _consumer():
            head_layout = plgpu.Layout.WGMMA.reduce(0)
            token_ids = plgpu.broadcasted_iota(jnp.int32, scores_shape, 0, layout=plgpu.Layout.WGMMA)

            def full(value, shape, layout=plgpu.Layout.WGMMA):
                return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

            def per_head(x, shape):
                return lax.broadcast_in_dim(x, shape, [1])

            def attend_tile(i, carry, piece):
                acc, m, total = carry
                slot = lax.rem(piece.step + i, stages)
                base = (piece.tile + i) * block_kv
                high = piece.seq_len - base
                low = 0 if window is None else high - window

                plgpu.barrier_wait(k_ready.at[slot])

                def scores(s_ref):
                    q = q_smem.at[lax.rem(piece.index, 2)]
                    plgpu.wgmma(s_ref, k_smem.at[slot], q.transpose((1, 0)))
                    return s_ref[...]

                s = pl.run_scoped(scores, plgpu.ACC(scores_shape, jnp.float32))
                plgpu.barrier_arrive(k_free.at[slot])
                if softcap is None:
                    s *= scale * LOG2E
                else:
                    s = jnp.tanh(s * (scale / softcap)) * (softcap * LOG2E)
                in_row = token_ids < high
                if window is not None:
                    in_row &= token_ids >= low
                s = jnp.where(in_row, s, NEG_INF)

                m_new = jnp.maximum(m, s.max(axis=0))
                alpha = jnp.exp2(m - m_new)
                p = jnp.exp2(s - per_head(m_new, scores_shape))
                total = total * per_head(alpha, scores_shape) + p
                p = plgpu.layout_cast(p.astype(p_smem.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
                p_smem.transpose((1, 0))[...] = p
                plgpu.commit_smem()

                plgpu.barrier_wait(v_ready.at[slot])

                @pl.when((high < block_kv) | (low > 0))
                def _zero_unused_values():  # 0 * NaN is NaN, so a probability of 0 is not enough
                    zero_rows_outside(v_smem.at[slot], low, high)
                    plgpu.commit_smem()

                def weighted_values(acc_ref):
                    plgpu.wgmma(acc_ref, v_smem.at[slot].transpose((1, 0)), p_smem.transpose((1, 0)))
                    return acc_ref[...]

                pv = pl.run_scoped(weighted_values, plgpu.ACC(out_shape, jnp.float32))
                plgpu.barrier_arrive(v_free.at[slot])
                return acc * per_head(alpha, out_shape) + pv, m_new, total

            def merge_parts(i, carry, first, count):
                """Fold MERGE_UNROLL partial results into the running one; their loads overlap."""
                acc, m, total = carry
                parts = []
                for j in range(MERGE_UNROLL):
                    at = i * MERGE_UNROLL + j
                    source = first + jnp.minimum(at, count - 1)
                    loaded = (
                        plgpu.load(part_out_ref.at[source], layout=plgpu.Layout.WGMMA, optimized=False),
                        plgpu.load(part_max_ref.at[source], layout=head_layout, optimized=False),
                        plgpu.load(part_sum_ref.at[source], layout=head_layout, optimized=False),
                    )
                    parts.append((at < count, *loaded))
                for is_real, part_acc, part_m, part_l in parts:
                    part_m = jnp.where(is_real, part_m, full(NEG_INF, m.shape, head_layout))
                    m_new = jnp.maximum(m, part_m)
                    alpha, weight = jnp.exp2(m - m_new), jnp.exp2(part_m - m_new)
                    acc = acc * per_head(alpha, out_shape) + part_acc * per_head(weight, out_shape)
                    m, total = m_new, total * alpha + part_l * weight
                return acc, m, total

            def attend_piece(piece):
                plgpu.barrier_wait(q_ready.at[lax.rem(piece.index, 2)])
                init = (
                    full(0, out_shape),
                    full(NEG_INF, (padded_group,), head_layout),
                    full(0, scores_shape),
                )
                attend = functools.partial(attend_tile, piece=piece)
                acc, m, total = lax.fori_loop(0, piece.count, attend, init)
                plgpu.barrier_arrive(q_free.at[lax.rem(piece.index, 2)])
                total = total.sum(axis=0)
                share = share_ref[0]

                @pl.when(piece.after > 0)
                def _hand_over():
                    part_out_ref[cta] = acc
                    part_max_ref[cta] = m
                    part_sum_ref[cta] = total
                    owner = cta + pl.cdiv(piece.after, share)
                    _arrive(arrivals_ref.at[pl.ds(owner, 1)])

                @pl.when(piece.after == 0)
                def _finish():
                    others = pl.cdiv(piece.before, share)

                    @pl.when(others > 0)
                    def _():
                        _await(arrivals_ref.at[pl.ds(cta, 1)], others)

                    merge = functools.partial(merge_parts, first=cta - others, count=others)
                    merged, merged_m, merged_total = lax.fori_loop(
                        0, pl.cdiv(others, MERGE_UNROLL), merge, (acc, m, total)
                    )
                    if sinks_ref:
                        sink = plgpu.load(sinks_ref[0].at[piece.head], layout=head_layout, optimized=False)
                        sink_max = jnp.maximum(merged_m, sink)
                        alpha = jnp.exp2(merged_m - sink_max)
                        merged *= per_head(alpha, out_shape)
                        merged_total = merged_total * alpha + jnp.exp2(sink - sink_max)
                    out = (merged / per_head(merged_total, out_shape)).astype(out_ref.dtype)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    o_smem.transpose((1, 0))[...] = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(
                        o_smem.at[pl.ds(0, group)], out_ref.at[piece.row, pl.ds(piece.head * group, group)]
                    )

            _walk(cta_work_ref, row_info_ref, num_kv_heads, attend_piece)

            padding = num_tokens_ref[0] + cta  # this CTA's first token past the batch
            num_ctas = cta_work_ref.shape[0]

            @pl.when(padding < out_ref.shape[0])
            def _zero_padding():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_smem[...] = jnp.zeros(o_smem.shape, o_smem.dtype)
                plgpu.commit_smem()

                def zero_token(i, _):
                    for head in range(0, num_kv_heads * group, group):
                        plgpu.copy_smem_to_gmem(
                            o_smem.at[pl.ds(0, group)], out_ref.at[padding + i * num_ctas, pl.ds(head, group)]
                        )

                lax.fori_loop(0, pl.cdiv(out_ref.shape[0] - padding, num_ctas), zero_token, None)

            plgpu.wait_smem_to_gmem(0)


def decode_attention(
    q: jax.Array,  # [T, H, D]
    k_cache: jax.Array,  # [N, KVH, BS, D]
    v_cache: jax.Array,  # [N, KVH, BS, D]
    block_tables: jax.Array,  # [S, M] int32
    plan: DecodePlan,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [H]
) -> jax.Array:
    """Attention of the batch's decode rows [T, H, D]; tokens past the batch are 0, other rows' undefined."""
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads, params = plan.num_kv_heads, plan.params
    group = num_heads // num_kv_heads
    padded_group = pl.cdiv(group, MIN_GROUP) * MIN_GROUP

    if group % TILE_ROWS and TILE_ROWS % group:  # a group may not straddle the swizzle tiles that TMA copies
        q = q.reshape(num_tokens, num_kv_heads, group, head_dim)
        q = jnp.pad(q, ((0, 0), (0, 0), (0, padded_group - group), (0, 0)))
    q = pad_rows(q.reshape(-1, head_dim), multiple=TILE_ROWS)
    operands = [q, k_cache, v_cache, block_tables, plan.row_info, plan.cta_work]
    operands += [plan.share, plan.num_tokens, plan.arrivals]
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(num_kv_heads, group) * LOG2E
        operands.append(jnp.pad(sinks, ((0, 0), (0, padded_group - group))))
    kernel = plgpu.kernel(
        functools.partial(_decode_kernel, group=group, scale=scale, window=plan.window, softcap=softcap, params=params),
        out_type=(
            jax.ShapeDtypeStruct((num_tokens, num_heads, head_dim), q.dtype),
            jax.ShapeDtypeStruct((params.num_ctas, head_dim, padded_group), jnp.float32),
            jax.ShapeDtypeStruct((params.num_ctas, padded_group), jnp.float32),
            jax.ShapeDtypeStruct((params.num_ctas, padded_group), jnp.float32),
        ),
        grid=(params.num_ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="wg",
        kernel_name="paged_decode",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(*operands)[0]
