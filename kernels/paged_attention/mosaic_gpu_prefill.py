"""Paged prefill attention for Hopper: many query tokens a row, causal, over cached and new keys alike.

One CTA an SM runs through a list of items, longest first. An item is a tile of query tokens of one row and
two query heads that share a KV head, one a consumer warpgroup (or twice the tokens and one head, if the group
is odd), so that both warpgroups read the same K and V tiles and need the same number of them:

    producer     item i: Q K0 V0 K1 V1 K2 V2 ..., then item i + 1 without a pause
    consumer 0   S0 = Q K0' | softmax 0        | O += P0 V0, S1 = Q K1' | softmax 1              | ...
    consumer 1              | S0 = Q K0'       | softmax 0              | O += P0 V0, S1 = Q K1' | ...

The barriers `turn` make one consumer issue its products while the other does its softmax (the ping-pong of
FlashAttention 3, arXiv 2407.08608), so the matrix units always have a product to work on.

Items are dealt to CTAs back and forth (0 1 2 2 1 0 0 1 2 ...) in order of falling cost, which evens out the
triangle:

    keys     0 . . . .          cost 1   tile 0   x
    queries  . . . . .          cost 2   tile 1   x x
                                cost 3   tile 2   x x x

A TMA copy into swizzled memory cannot begin inside a swizzle tile of 8 rows, and drops what it would have to shift.
Query tiles therefore begin at multiples of 8 tokens of the packed batch, and the first tile of a row may hold up to
7 tokens of the row before it, which are computed in vain and not stored.

The bound is the matrix units: 4 * head_dim * (query, key) pairs under the mask, over their rate.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.paged_attention import mosaic_gpu_prefill_items as item_lists
from jaxinfer.kernels.paged_attention.mosaic_gpu_common import (
    LOG2E,
    NEG_INF,
    TILE_ROWS,
    pad_rows,
    swizzled_smem,
    zero_rows_outside,
)
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_plan import (
    CONSUMERS,
    ROWS,
    PrefillParams,
    PrefillPlan,
    plan_prefill,
)

__all__ = ["PrefillParams", "PrefillPlan", "plan_prefill", "prefill_attention"]

# Where running maxima begin: far over a masked score, whose probability is then 0 in a row that saw none but such
# (from NEG_INF on it would be exp2 of the rounding error of 1e30), and far under any other.
MAX_FLOOR = -1e20


class _RegisterAccumulator:
    """O in the accumulator registers of wgmma; `add` only issues the product, the others await it."""

    def __init__(self, ref: Any):
        self._ref = ref

    def add(self, p: jax.Array, v_smem: Any) -> None:
        plgpu.wgmma(self._ref, p, v_smem)

    def scale(self, factor: jax.Array) -> None:
        acc = self._ref[...]
        self._ref[...] = acc * lax.broadcast_in_dim(factor, acc.shape, [0])

    def read(self) -> jax.Array:
        return self._ref[...]


class _SharedAccumulator:
    """O and P in shared memory: the same results from what the interpreter knows."""

    def __init__(self, acc_smem: Any, p_smem: Any):
        self._acc, self._p = acc_smem, p_smem
        self._acc[...] = jnp.zeros(acc_smem.shape, jnp.float32)

    def add(self, p: jax.Array, v_smem: Any) -> None:
        self._p[...] = p
        plgpu.commit_smem()

        def product(ref):
            plgpu.wgmma(ref, self._p, v_smem)
            return ref[...]

        self._acc[...] = self._acc[...] + pl.run_scoped(product, plgpu.ACC(self._acc.shape, jnp.float32))

    def scale(self, factor: jax.Array) -> None:
        self._acc[...] = self._acc[...] * lax.broadcast_in_dim(factor, self._acc.shape, [0])

    def read(self) -> jax.Array:
        return self._acc[...]


def _prefill_kernel(
    q_ref,  # [T, H, D]
    k_ref,  # [N, KVH, BS, D]
    v_ref,  # [N, KVH, BS, D]
    block_tables_ref,  # [S, M]
    tiles_ref,  # [max_tiles, 6]
    sections_ref,  # [max_tiles, 3]
    num_tiles_ref,  # [2]
    *refs,  # sinks [H] where there are any; then out [T, H, D]
    group: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    params: PrefillParams,
):
    *sinks_ref, out_ref = refs
    _, num_heads, head_dim = q_ref.shape
    block_size = k_ref.shape[2]
    block_kv, stages, q_buffers = params.block_kv, params.num_stages, params.q_buffers
    copy_tokens = min(block_size, block_kv)
    num_copies = block_kv // copy_tokens
    items = item_lists.ItemList(tiles_ref, sections_ref, num_tiles_ref, num_heads, group, window, params)
    per_item = items.per_item
    in_smem = params.accumulate_in_smem
    if params.ctas == 1:
        multicast, kv_free = {}, functools.partial(plgpu.Barrier, num_arrivals=CONSUMERS, num_barriers=stages)
        first_consumer = 0
    else:
        multicast = {"collective_axes": "rank"}
        kv_free = functools.partial(
            plgpu.ClusterBarrier, collective_axes=("rank",), num_arrivals=CONSUMERS, num_barriers=stages
        )
        first_consumer = lax.axis_index("rank") * CONSUMERS

    # An item's output takes the place of its queries, swizzled or plain. (The interpreter takes any two accesses to
    # a union for a conflict, and knows no swizzling.)
    q_memory = swizzled_smem((q_buffers, CONSUMERS, ROWS, head_dim), q_ref.dtype)

    @functools.partial(
        pl.run_scoped,
        qo_smem=q_memory if in_smem else plgpu.RefUnion(q_memory, plgpu.SMEM(q_memory.shape, q_ref.dtype)),
        # Records, and the two places of claims.
        record_smem=plgpu.SMEM((q_buffers + 2, item_lists.NUM_FIELDS), jnp.int32),
        k_smem=swizzled_smem((stages, block_kv, head_dim), k_ref.dtype),
        v_smem=swizzled_smem((stages, block_kv, head_dim), v_ref.dtype),
        p_smem=swizzled_smem((CONSUMERS, ROWS, block_kv), v_ref.dtype, like=head_dim) if in_smem else None,
        acc_smem=plgpu.SMEM((CONSUMERS, ROWS, head_dim), jnp.float32) if in_smem else None,
        q_ready=plgpu.Barrier(num_arrivals=CONSUMERS + 1, num_barriers=q_buffers),
        k_ready=plgpu.Barrier(num_arrivals=num_copies, num_barriers=stages),
        v_ready=plgpu.Barrier(num_arrivals=num_copies, num_barriers=stages),
        q_free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=q_buffers),
        k_free=kv_free(),
        v_free=kv_free(),
        # One a stage: consumer 0 cannot come to a stage again before consumer 1 has released, so observed, it. With a
        # single barrier it could be two completions ahead, which hangs a waiter that knows phases by their parity.
        v_clean=plgpu.Barrier(num_barriers=stages),
        turn=plgpu.Barrier(num_barriers=CONSUMERS),
        claimed=plgpu.ClusterBarrier(collective_axes=("rank",), num_barriers=2) if params.ctas > 1 else None,
        collective_axes="wg",
    )
    def _scope(
        qo_smem, record_smem, k_smem, v_smem, p_smem, acc_smem,
        q_ready, k_ready, v_ready, q_free, k_free, v_free, v_clean, turn, claimed,
    ):  # fmt: skip
        wg = lax.axis_index("wg")
        q_smem, o_smem = (qo_smem, qo_smem) if in_smem else qo_smem

        @pl.when(wg == CONSUMERS)
        def _producer():
            plgpu.set_max_registers(40, action="decrease")

            def page_ids(row, item, step):
                """Block ids of a step's copies; past the row's end its last real block again."""
                last = (item.seq_len - 1) // block_size
                blocks = [(step * block_kv + i * copy_tokens) // block_size for i in range(num_copies)]
                return tuple(block_tables_ref[row, jnp.minimum(b, last)] for b in blocks)

            def await_record(i):
                buffer = lax.rem(i, q_buffers)

                @pl.when(i >= q_buffers)
                def _():
                    plgpu.barrier_wait(q_free.at[buffer])

                return buffer

            def load_item(carry):
                i, done, index = carry
                row, item = items.read(index)
                buffer = await_record(i)
                item.write(record_smem.at[buffer])
                plgpu.barrier_arrive(q_ready.at[buffer])
                for consumer in range(CONSUMERS):
                    head, offset = item.part(first_consumer + consumer, per_item)
                    plgpu.copy_gmem_to_smem(
                        q_ref.at[pl.ds(item.token + offset, ROWS), head],
                        q_smem.at[buffer, consumer],
                        q_ready.at[buffer],
                    )

                def load_step(step, carry):
                    done, pages = carry
                    slot = lax.rem(done, stages)
                    next_pages = page_ids(row, item, jnp.minimum(step + 1, item.end_step - 1))
                    offset = lax.rem(step * block_kv, block_size) if block_size > block_kv else 0
                    for source, smem, ready, free in (
                        (k_ref, k_smem, k_ready, k_free),
                        (v_ref, v_smem, v_ready, v_free),
                    ):

                        @pl.when(done >= stages)
                        def _(free=free):
                            plgpu.barrier_wait(free.at[slot])

                        for c, page in enumerate(pages):
                            plgpu.copy_gmem_to_smem(
                                source.at[page, item.head // group, pl.ds(offset, copy_tokens)],
                                smem.at[slot, pl.ds(c * copy_tokens, copy_tokens)],
                                ready.at[slot],
                                **multicast,
                            )
                    return done + 1, next_pages

                init = (done, page_ids(row, item, item.first_step))
                done, _ = lax.fori_loop(item.first_step, item.end_step, load_step, init)
                return i + 1, done, items.deal(i + 1, record_smem.at[pl.ds(q_buffers, 2), pl.ds(0, 1)], claimed)

            zero = jnp.int32(0)
            init = (zero, zero, items.deal(zero, record_smem.at[pl.ds(q_buffers, 2), pl.ds(0, 1)], claimed))
            count, done, _ = lax.while_loop(lambda carry: carry[2] < items.total, load_item, init)
            buffer = await_record(count)
            item_lists.write_end(record_smem.at[buffer])
            for _ in range(CONSUMERS + 1):
                plgpu.barrier_arrive(q_ready.at[buffer])

            # Nobody may leave before the last completion of every barrier has been seen.
            def drain_kv(i, _):
                plgpu.barrier_wait(k_free.at[lax.rem(i, stages)])
                plgpu.barrier_wait(v_free.at[lax.rem(i, stages)])

            def drain_q(i, _):
                plgpu.barrier_wait(q_free.at[lax.rem(i, q_buffers)])

            lax.fori_loop(jnp.maximum(done - stages, 0), done, drain_kv, None)
            lax.fori_loop(jnp.maximum(count - q_buffers + 1, 0), count, drain_q, None)

        @pl.when(wg < CONSUMERS)
        def _consumer():
            plgpu.set_max_registers(232, action="increase")
            row_layout = plgpu.Layout.WGMMA.reduce(1)
            scores_shape, out_shape = (ROWS, block_kv), (ROWS, head_dim)
            to_log2 = LOG2E * (scale if softcap is None else 1)

            def iota(shape, axis):
                return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)

            def per_row(x, shape):
                return lax.broadcast_in_dim(x, shape, [0])

            def take_turn():
                if params.take_turns:
                    plgpu.barrier_wait(turn.at[wg])

            def pass_turn():
                if params.take_turns:
                    plgpu.barrier_arrive(turn.at[1 - wg])

            def wait_for_values(item, step, slot, *, is_last=False):
                plgpu.barrier_wait(v_ready.at[slot])
                if window is None and not is_last:  # only a row's last tile has unused slots
                    return
                high = item.seq_len - step * block_kv
                low = 0 if window is None else item.position + item.low - window + 1 - step * block_kv

                @pl.when((high < block_kv) | (low > 0))
                def _zero_unused_values():  # 0 * NaN is NaN, so a probability of 0 is not enough
                    @pl.when(wg == 0)
                    def _():
                        zero_rows_outside(v_smem.at[slot], low, high)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(v_clean.at[slot])

                    plgpu.barrier_wait(v_clean.at[slot])

            def softmax(s, m, total, position, step, masked):
                """Probabilities of a step, and the factor by which earlier results shrink."""
                if softcap is not None:
                    s = jnp.tanh(s * (scale / softcap)) * softcap
                if masked:
                    distance = position - step * block_kv + iota(scores_shape, 0) - iota(scores_shape, 1)
                    seen = distance >= 0
                    if window is not None:
                        seen &= distance < window
                    s = jnp.where(seen, s, NEG_INF)
                m_new = jnp.maximum(m, s.max(axis=1) * to_log2)
                alpha = jnp.exp2(m - m_new)
                p = jnp.exp2(s * to_log2 - per_row(m_new, scores_shape))
                return p.astype(v_smem.dtype), m_new, total * alpha + p.sum(axis=1), alpha

            def attend(i, done, acc):
                buffer = lax.rem(i, q_buffers)
                item = item_lists.Item.read(record_smem.at[buffer])
                _, offset = item.part(first_consumer + wg, per_item)
                position = item.position + offset
                q = q_smem.at[buffer, wg]

                def first_step(s_ref):
                    slot = lax.rem(done, stages)
                    plgpu.barrier_wait(k_ready.at[slot])
                    take_turn()
                    plgpu.wgmma(s_ref, q, k_smem.at[slot].transpose((1, 0)))
                    pass_turn()
                    s = s_ref[...]
                    plgpu.barrier_arrive(k_free.at[slot])
                    m = plgpu.layout_cast(jnp.full((ROWS,), MAX_FLOOR, jnp.float32), row_layout)
                    total = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), row_layout)
                    return softmax(s, m, total, position, item.first_step, masked=True)[:3]

                def next_step(step, carry, *, masked):
                    p, m, total = carry
                    now = done + step - item.first_step
                    slot, last_slot = lax.rem(now, stages), lax.rem(now - 1, stages)

                    def products(s_ref):
                        wait_for_values(item, step - 1, last_slot)
                        plgpu.barrier_wait(k_ready.at[slot])
                        take_turn()
                        acc.add(p, v_smem.at[last_slot])
                        plgpu.wgmma(s_ref, q, k_smem.at[slot].transpose((1, 0)))
                        pass_turn()
                        return s_ref[...]

                    s = pl.run_scoped(products, plgpu.ACC(scores_shape, jnp.float32))
                    plgpu.barrier_arrive(v_free.at[last_slot])
                    plgpu.barrier_arrive(k_free.at[slot])
                    p, m, total, alpha = softmax(s, m, total, position, step, masked)
                    acc.scale(alpha)
                    return p, m, total

                # Steps below `diagonal` are seen whole by every query of this consumer.
                second, end = item.first_step + 1, item.end_step
                diagonal = second if window is not None else jnp.clip((position + 1) // block_kv, second, end)
                carry = pl.run_scoped(first_step, plgpu.ACC(scores_shape, jnp.float32))
                if q_buffers > 1:
                    pl.when(i > 0)(lambda: release(i - 1))
                carry = lax.fori_loop(second, diagonal, functools.partial(next_step, masked=False), carry)
                carry = lax.fori_loop(diagonal, end, functools.partial(next_step, masked=True), carry)

                p, m, total = carry
                last_slot = lax.rem(done + end - 1 - item.first_step, stages)
                wait_for_values(item, end - 1, last_slot, is_last=True)
                acc.add(p, v_smem.at[last_slot])
                out = acc.read()
                plgpu.barrier_arrive(v_free.at[last_slot])
                done = done + end - item.first_step
                item = item_lists.Item.read(record_smem.at[buffer])  # again: not worth registers through the loop
                head, offset = item.part(first_consumer + wg, per_item)
                if sinks_ref:
                    sink = sinks_ref[0][head]
                    m_new = jnp.maximum(m, sink)
                    alpha = jnp.exp2(m - m_new)
                    total = total * alpha + jnp.exp2(sink - m_new)
                    out = out * per_row(alpha, out_shape)
                out = (out * per_row(1 / total, out_shape)).astype(out_ref.dtype)
                low, high = (jnp.clip(x - offset, 0, ROWS) for x in (item.low, item.high))
                store(out, item.token + offset, head, low, high, q_smem.at[buffer, wg], o_smem.at[buffer, wg])
                return done

            def store(out, token, head, low, high, o_swizzled, o_plain):
                count = high - low

                @pl.when(count == ROWS)
                def _whole():
                    o_swizzled[...] = out
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(o_swizzled, out_ref.at[pl.ds(token, ROWS), head])

                @pl.when(count < ROWS)
                def _part():  # a TMA copy has a fixed size: one copy for each bit of count
                    o_plain[...] = out
                    plgpu.commit_smem()
                    size = ROWS // 2
                    while size:
                        at = low + (count // (2 * size)) * (2 * size)

                        @pl.when((count // size) % 2 == 1)
                        def _(size=size, at=at):
                            plgpu.copy_smem_to_gmem(
                                o_plain.at[pl.ds(at, size)], out_ref.at[pl.ds(token + at, size), head]
                            )

                        size //= 2

            def release(i):
                """Let the producer have the memory of an item once its output has been copied from there."""
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(q_free.at[lax.rem(i, q_buffers)])

            def attend_item(carry):
                i, done, _ = carry
                if in_smem:
                    done = attend(i, done, _SharedAccumulator(acc_smem.at[wg], p_smem.at[wg]))
                else:
                    done = pl.run_scoped(
                        lambda ref: attend(i, done, _RegisterAccumulator(ref)),
                        plgpu.ACC(out_shape, jnp.float32),
                    )
                if q_buffers == 1:
                    release(i)
                return i + 1, done, await_item(i + 1)

            def await_item(i):
                buffer = lax.rem(i, q_buffers)
                plgpu.barrier_wait(q_ready.at[buffer])
                return item_lists.is_item(record_smem.at[buffer])

            if params.take_turns:
                pl.when(wg == 1)(lambda: plgpu.barrier_arrive(turn.at[1 - lax.axis_index("wg")]))
            zero = jnp.int32(0)
            count, _, _ = lax.while_loop(lambda carry: carry[2], attend_item, (zero, zero, await_item(zero)))
            if q_buffers > 1:
                pl.when(count > 0)(lambda: release(count - 1))
            if params.take_turns:
                pl.when(wg == 0)(lambda: plgpu.barrier_wait(turn.at[lax.axis_index("wg")]))
            plgpu.wait_smem_to_gmem(0)


def prefill_attention(
    q: jax.Array,  # [T, H, D]
    k_cache: jax.Array,  # [N, KVH, BS, D]
    v_cache: jax.Array,  # [N, KVH, BS, D]
    block_tables: jax.Array,  # [S, M] int32
    plan: PrefillPlan,
    out: jax.Array | None = None,  # [T, H, D]
    *,
    scale: float,
    softcap: float | None = None,
    sinks: jax.Array | None = None,  # [H]
) -> jax.Array:
    """Attention of the batch's prefill rows. Other tokens keep what `out` holds (undefined without it)."""
    num_tokens = q.shape[0]
    q = pad_rows(q, multiple=TILE_ROWS, minimum=ROWS)
    operands = [q, k_cache, v_cache, block_tables, plan.tiles, plan.sections, plan.num_tiles]
    if sinks is not None:
        operands.append(sinks.astype(jnp.float32) * LOG2E)
    kernel = functools.partial(
        plgpu.kernel,
        functools.partial(
            _prefill_kernel,
            group=plan.group,
            scale=scale,
            window=plan.window,
            softcap=softcap,
            params=plan.params,
        ),
        grid=(max(plan.params.num_sms // plan.params.ctas, 1),),
        grid_names=("cta",),
        **({"cluster": (plan.params.ctas,), "cluster_names": ("rank",)} if plan.params.ctas > 1 else {}),
        num_threads=CONSUMERS + 1,
        thread_name="wg",
        kernel_name="paged_prefill",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            reduction_scratch_bytes=0,  # reductions stay inside groups of four threads
        ),
    )
    if out is None:
        out = kernel(out_type=jax.ShapeDtypeStruct(q.shape, q.dtype))(*operands)
    else:
        out_ref = jax.new_ref(pad_rows(out, multiple=TILE_ROWS, minimum=ROWS))
        kernel(out_type=())(*operands, out_ref)
        out = jax.freeze(out_ref)
    return out[:num_tokens]
