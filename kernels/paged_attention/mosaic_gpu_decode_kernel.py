"""The decode kernel: one query token a row, K and V read exactly once.

How the rows are cut over CTAs is in `mosaic_gpu_decode_plan.py`. Inside a CTA, two warpgroups and a ring of
`num_stages` K and V tiles in shared memory:

    producer   page id -> TMA K[s] -> TMA V[s] -> page id -> ...        waits on k_free[s], v_free[s]
                     |           |
                 k_ready[s]  v_ready[s]
                     v           v
    consumer   S' = K Q'  -> mask, online softmax over rows of S' -> P in SMEM -> O' += V' P

Everything is computed transposed (' is a transpose): tokens are the M of the first product and head_dim the M
of the second, so the few query heads of a group are a wgmma N of 8, not an M padded to 64. A head_dim that is no
multiple of 64 has its last 64 columns as a second, overlapping M (80: columns 0..63 and 16..79), so that no tile is
padded; what the overlap holds is computed and stored twice.

An fp8 cache arrives in tiles as they lie in memory. The consumer turns each into f16, which holds every e4m3 value, in
a second, swizzled tile, V while the first product runs and the next K while the second does, and both products are
those of f16: wgmma takes fp8 operands only along K, which V' is not, and would want q and the probabilities rounded to
fp8 as well. Queries take the same way; those beyond the range of f16 are cut off.

No barrier surrounds a store to shared memory: `commit_smem`, of which each tile has one after its P, keeps the four
warps together. What a warp writes before it (a widened tile, P, O) the products read after it, and every product is
awaited by each warp before its next one, so that when the tile or P is written again, all warps are done with it.

The bound is device memory: 2 * tokens * kv_heads * head_dim * itemsize bytes over the reading rate.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.paged_attention.mosaic_gpu_common import (
    LOG2E,
    NEG_INF,
    TILE_ROWS,
    await_counter,
    copy_layout,
    copy_rows,
    signal_counter,
    swizzled_smem,
    zero_rows_outside,
)
from jaxinfer.kernels.paged_attention.mosaic_gpu_decode_plan import DecodeParams, walk

MERGE_UNROLL = 4  # partial results in flight while merging, if registers allow
MERGE_REGISTERS = 64  # of a thread, for these
F16_MAX = 65504.0


def product_rows(head_dim: int) -> list[tuple[int, int]]:
    """(first, number) of the rows of O' that each product with V' computes; numbers are multiples of 64."""
    whole = head_dim // 64 * 64
    return [(0, whole)] if whole == head_dim else [(0, whole), (head_dim - 64, 64)]


def decode_kernel(
    q_ref,  # [T * H, D]
    k_ref,  # [N, KVH, BS, D]
    v_ref,  # [N, KVH, BS, D]
    block_tables_ref,  # [S, M]
    row_info_ref,  # [S, 3]
    cta_work_ref,  # [C, 8]
    num_tokens_ref,  # [1]
    arrivals_ref,  # [C]
    *refs,  # k_scale [1] and v_scale [1], sinks [KVH, padded group] where there are any; then the outputs
    group: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    has_scales: bool,
    has_sinks: bool,
    params: DecodeParams,
):
    *optional, out_ref, part_out_ref, part_max_ref, part_sum_ref = refs
    scale_refs = [optional.pop(0), optional.pop(0)] if has_scales else None
    sinks_ref = optional.pop(0) if has_sinks else None
    _, num_kv_heads, block_size, head_dim = k_ref.shape
    block_kv, stages = params.block_kv, params.num_stages
    is_quantised = k_ref.dtype != q_ref.dtype
    dtype = jnp.float16 if is_quantised else k_ref.dtype  # of the products' operands
    keys_in_registers = is_quantised and params.keys_in_registers and block_kv == 64 and head_dim % 32 == 0
    padded_group = part_out_ref.shape[-1]
    acc_registers = part_out_ref.shape[1] * padded_group // 128
    room = MERGE_REGISTERS // (4 if is_quantised else 1)
    merge_unroll = max(1, min(MERGE_UNROLL, room // acc_registers))
    widens_ahead = is_quantised and not keys_in_registers and acc_registers <= 32
    # TMA cannot swizzle groups that straddle the tiles of a swizzle, nor convert.
    is_staged = is_quantised or (group % TILE_ROWS != 0 and TILE_ROWS % group != 0)
    copy_tokens = min(block_size, block_kv)
    num_copies = block_kv // copy_tokens
    scores_shape, tile_shape = (block_kv, padded_group), (block_kv, head_dim)
    blocks = product_rows(head_dim)
    cta = lax.axis_index("cta")

    @functools.partial(
        pl.run_scoped,
        q_smem=[swizzled_smem((1 if is_staged else 2, padded_group, head_dim), dtype)]
        + [plgpu.SMEM((2, padded_group, head_dim), q_ref.dtype)] * is_staged,
        kv_smem=[
            swizzled_smem((stages, *tile_shape), k_ref.dtype)
            if not is_quantised or (is_key and keys_in_registers)
            else plgpu.SMEM((stages, *tile_shape), k_ref.dtype)
            for is_key in (True, False)
        ],
        whole_smem=[swizzled_smem(tile_shape, dtype)] * (is_quantised + (is_quantised and not keys_in_registers)),
        p_smem=swizzled_smem((padded_group, block_kv), dtype, like=head_dim),
        o_smem=plgpu.SMEM((padded_group, head_dim), out_ref.dtype),
        q_ready=plgpu.Barrier(num_barriers=2),
        k_ready=plgpu.Barrier(num_arrivals=num_copies, num_barriers=stages),
        v_ready=plgpu.Barrier(num_arrivals=num_copies, num_barriers=stages),
        q_free=plgpu.Barrier(num_barriers=2),
        k_free=plgpu.Barrier(num_barriers=stages),
        v_free=plgpu.Barrier(num_barriers=stages),
        collective_axes="wg",
    )
    def _scope(q_smem, kv_smem, whole_smem, p_smem, o_smem, q_ready, k_ready, v_ready, q_free, k_free, v_free):
        wg = lax.axis_index("wg")
        k_smem, v_smem = kv_smem

        @pl.when(wg == 1)
        def _producer():
            def page_ids(piece, tile):
                """Block ids of a tile's copies; past the row's end its last real block again."""
                last = (piece.seq_len - 1) // block_size
                blocks = [(tile * block_kv + i * copy_tokens) // block_size for i in range(num_copies)]
                return tuple(block_tables_ref[piece.row, jnp.minimum(b, last)] for b in blocks)

            def load_piece(piece):
                q_slot = lax.rem(piece.index, 2)
                first_pages = page_ids(piece, piece.tile)

                @pl.when(piece.index >= 2)
                def _():
                    plgpu.barrier_wait(q_free.at[q_slot])

                q_row = (piece.row * num_kv_heads + piece.head) * group
                q_tile = q_ref.at[pl.ds(q_row, padded_group)]  # the rows past the group are computed in vain
                plgpu.copy_gmem_to_smem(q_tile, q_smem[-1].at[q_slot], q_ready.at[q_slot])

                def load_tile(i, pages):
                    slot = lax.rem(piece.step + i, stages)
                    next_pages = page_ids(piece, piece.tile + jnp.minimum(i + 1, piece.count - 1))
                    offset = lax.rem((piece.tile + i) * block_kv, block_size) if block_size > block_kv else 0
                    plgpu.commit_smem()  # a barrier: a warp that lags two rounds behind the others would miss a phase
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

                lax.fori_loop(0, piece.count, load_tile, first_pages)

            tiles, pieces = walk(cta_work_ref, row_info_ref, num_kv_heads, load_piece)

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
            padding = num_tokens_ref[0] + cta  # this CTA's first token past the batch
            k_scale, v_scale = (ref[0] for ref in scale_refs) if scale_refs is not None else (1.0, None)

            def full(value, shape, layout: Any = plgpu.Layout.WGMMA):
                return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)

            def per_head(x, shape):
                return lax.broadcast_in_dim(x, shape, [1])

            def widen(tiles, slot, whole, ready, free):
                """An fp8 tile as f16 where wgmma reads it; the tile is free then."""
                plgpu.barrier_wait(ready.at[slot])
                itemsize = jnp.dtype(dtype).itemsize
                layout = copy_layout(head_dim, itemsize)
                at_once = not keys_in_registers and head_dim <= 128  # otherwise registers are few
                rows = block_kv if at_once else copy_rows(head_dim, itemsize)
                for row in range(0, block_kv, rows):
                    values = plgpu.load(tiles.at[slot, pl.ds(row, rows)], layout=layout)
                    whole[pl.ds(row, rows)] = values.astype(whole.dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(free.at[slot])

            def widen_keys(step, *, ahead):
                if is_quantised and not keys_in_registers and ahead == widens_ahead:
                    widen(k_smem, lax.rem(step, stages), whole_smem[-1], k_ready, k_free)

            def stage_queries(slot):
                """Queries as the products' operand, where TMA could not make them that."""
                layout = copy_layout(head_dim, jnp.dtype(dtype).itemsize, rows=8)
                rows = plgpu.load(q_smem[1].at[slot], layout=layout)
                if is_quantised:  # f16 overflows where bf16 does not
                    rows = jnp.minimum(jnp.maximum(rows.astype(jnp.float32), -F16_MAX), F16_MAX)
                q_smem[0][0] = rows.astype(dtype)
                plgpu.commit_smem()

            def attend_tile(i, carry, piece):
                acc, m, total = carry
                slot = lax.rem(piece.step + i, stages)
                base = (piece.tile + i) * block_kv
                high = piece.seq_len - base
                low = 0 if window is None else high - window
                k_tile, v_tile = (whole_smem[-1], whole_smem[0]) if is_quantised else (k_smem.at[slot], v_smem.at[slot])

                widen_keys(piece.step + i, ahead=False)
                if not is_quantised or keys_in_registers:
                    plgpu.barrier_wait(k_ready.at[slot])
                if keys_in_registers:
                    k_tile = plgpu.load(k_smem.at[slot], layout=plgpu.Layout.WGMMA_UPCAST_2X)
                    k_tile = plgpu.layout_cast(k_tile.astype(dtype), plgpu.Layout.WGMMA)
                    plgpu.barrier_arrive(k_free.at[slot])

                def scores(s_ref):
                    q = q_smem[0].at[0 if is_staged else lax.rem(piece.index, 2)]
                    plgpu.wgmma(s_ref, k_tile, q.transpose((1, 0)))
                    if is_quantised:
                        widen(v_smem, slot, v_tile, v_ready, v_free)
                    return s_ref[...]

                s = pl.run_scoped(scores, plgpu.ACC(scores_shape, jnp.float32))  # pyright: ignore[reportPrivateImportUsage]
                if not is_quantised:
                    plgpu.barrier_arrive(k_free.at[slot])
                if softcap is None:
                    s *= scale * LOG2E * k_scale
                else:
                    s = jnp.tanh(s * (scale / softcap * k_scale)) * (softcap * LOG2E)
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

                if not is_quantised:
                    plgpu.barrier_wait(v_ready.at[slot])

                @pl.when((high < block_kv) | (low > 0))
                def _zero_unused_values():  # 0 * NaN is NaN, so a probability of 0 is not enough
                    zero_rows_outside(v_tile, low, high)
                    plgpu.commit_smem()

                def weighted_values(*acc_refs):
                    for (first, count), acc_ref in zip(blocks, acc_refs, strict=True):
                        v = v_tile if count == head_dim else v_tile.at[:, pl.ds(first, count)]
                        plgpu.wgmma(acc_ref, v.transpose((1, 0)), p_smem.transpose((1, 0)))
                    if widens_ahead:
                        pl.when(i + 1 < piece.count)(lambda: widen_keys(piece.step + i + 1, ahead=True))
                    return tuple(acc_ref[...] for acc_ref in acc_refs)

                accumulators = [plgpu.ACC((count, padded_group), jnp.float32) for _, count in blocks]  # pyright: ignore[reportPrivateImportUsage]
                pv = pl.run_scoped(weighted_values, *accumulators)
                if not is_quantised:
                    plgpu.barrier_arrive(v_free.at[slot])
                return _scaled_sum(acc, alpha, pv), m_new, total

            def _scaled_sum(acc, alpha, other, weight=None):
                """acc * alpha + other * weight, of all products' rows."""
                sums = []
                for a, b in zip(acc, other, strict=True):
                    b = b if weight is None else b * per_head(weight, b.shape)
                    sums.append(a * per_head(alpha, a.shape) + b)
                return tuple(sums)

            def part_rows(cta):
                """A CTA's partial result in device memory, by product."""
                starts = [sum(count for _, count in blocks[:i]) for i in range(len(blocks))]
                return [part_out_ref.at[cta, pl.ds(s, count)] for s, (_, count) in zip(starts, blocks, strict=True)]

            def merge_parts(i, carry, first, count):
                """Fold `merge_unroll` partial results into the running one; their loads overlap."""
                acc, m, total = carry
                parts = []
                for j in range(merge_unroll):
                    at = i * merge_unroll + j
                    source = first + jnp.minimum(at, count - 1)
                    loaded = (
                        [plgpu.load(x, layout=plgpu.Layout.WGMMA, optimized=False) for x in part_rows(source)],
                        plgpu.load(part_max_ref.at[source], layout=head_layout, optimized=False),
                        plgpu.load(part_sum_ref.at[source], layout=head_layout, optimized=False),
                    )
                    parts.append((at < count, *loaded))
                for is_real, part_acc, part_m, part_l in parts:
                    part_m = jnp.where(is_real, part_m, full(NEG_INF, m.shape, head_layout))
                    m_new = jnp.maximum(m, part_m)
                    alpha, weight = jnp.exp2(m - m_new), jnp.exp2(part_m - m_new)
                    acc = _scaled_sum(acc, alpha, part_acc, weight)
                    m, total = m_new, total * alpha + part_l * weight
                return acc, m, total

            def stage_output(products):
                """Put O, by product, where TMA takes it from."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for (first, count), rows in zip(blocks, products, strict=True):
                    rows = plgpu.layout_cast(rows.astype(out_ref.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
                    o_smem.at[:, pl.ds(first, count)].transpose((1, 0))[...] = rows
                plgpu.commit_smem()

            def zeros():
                return tuple(full(0, (count, padded_group)) for _, count in blocks)

            def attend_piece(piece):
                q_slot = lax.rem(piece.index, 2)
                plgpu.barrier_wait(q_ready.at[q_slot])
                if is_staged:
                    stage_queries(q_slot)
                init = (
                    zeros(),
                    full(NEG_INF, (padded_group,), head_layout),
                    full(0, scores_shape),
                )
                widen_keys(piece.step, ahead=True)
                attend = functools.partial(attend_tile, piece=piece)
                acc, m, total = lax.fori_loop(0, piece.count, attend, init)
                plgpu.barrier_arrive(q_free.at[q_slot])
                total = total.sum(axis=0)

                @pl.when(piece.after > 0)
                def _hand_over():
                    for ref, rows in zip(part_rows(cta), acc, strict=True):
                        ref[...] = rows
                    part_max_ref[cta] = m
                    part_sum_ref[cta] = total
                    owner = cta + pl.cdiv(piece.after, piece.share)
                    signal_counter(arrivals_ref.at[pl.ds(owner, 1)])

                @pl.when(piece.after == 0)
                def _finish():
                    others = pl.cdiv(piece.before, piece.share)

                    @pl.when(others > 0)
                    def _():
                        await_counter(arrivals_ref.at[pl.ds(cta, 1)], others)

                    merge = functools.partial(merge_parts, first=cta - others, count=others)
                    steps = pl.cdiv(others, merge_unroll)
                    merged, merged_m, merged_total = lax.fori_loop(0, steps, merge, (acc, m, total))
                    if sinks_ref is not None:
                        sink = plgpu.load(sinks_ref.at[piece.head], layout=head_layout, optimized=False)
                        sink_max = jnp.maximum(merged_m, sink)
                        alpha = jnp.exp2(merged_m - sink_max)
                        merged = tuple(x * per_head(alpha, x.shape) for x in merged)
                        merged_total = merged_total * alpha + jnp.exp2(sink - sink_max)
                    out = tuple(x / per_head(merged_total, x.shape) for x in merged)
                    stage_output(out if v_scale is None else tuple(x * v_scale for x in out))
                    plgpu.copy_smem_to_gmem(
                        o_smem.at[pl.ds(0, group)], out_ref.at[piece.row, pl.ds(piece.head * group, group)]
                    )

            walk(cta_work_ref, row_info_ref, num_kv_heads, attend_piece)
            num_ctas = cta_work_ref.shape[0]

            @pl.when(padding < out_ref.shape[0])
            def _zero_padding():
                stage_output(zeros())

                def zero_token(i, _):
                    for head in range(0, num_kv_heads * group, group):
                        plgpu.copy_smem_to_gmem(
                            o_smem.at[pl.ds(0, group)], out_ref.at[padding + i * num_ctas, pl.ds(head, group)]
                        )

                lax.fori_loop(0, pl.cdiv(out_ref.shape[0] - padding, num_ctas), zero_token, None)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
