"""The consumers of the prefill kernel: two warpgroups that multiply, each 64 query rows of every item.

    consumer 0   S0 = Q K0' | softmax 0        | O += P0 V0, S1 = Q K1' | softmax 1              | ...
    consumer 1              | S0 = Q K0'       | softmax 0              | O += P0 V0, S1 = Q K1' | ...

The barriers `turn` make one issue its products while the other does its softmax (the ping-pong of FlashAttention 3,
arXiv 2407.08608), so the matrix units always have a product to work on. Running maxima are in units of log2.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.paged_attention import mosaic_gpu_prefill_items as item_lists
from jaxinfer.kernels.paged_attention import mosaic_gpu_prefill_products as products
from jaxinfer.kernels.paged_attention.mosaic_gpu_common import LOG2E, NEG_INF, copy_rows_out
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_memory import Layer, Memory
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_plan import CONSUMERS, ROWS

# Where running maxima begin: far over a masked score, whose probability is then 0 in a row that saw none but such
# (from NEG_INF on it would be exp2 of the rounding error of 1e30), and far under any other.
MAX_FLOOR = -1e20
MAX_RISE = 8.0  # log2 of what probabilities may be before O is scaled again


class _RegisterAccumulator:
    """O in the accumulator registers of wgmma; `add` only issues the product, the others await it."""

    def __init__(self, ref: Any):
        self._ref = ref

    def add(self, p: Any, v_smem: Any) -> None:
        plgpu.wgmma(self._ref, p, v_smem)

    def scale(self, factor: jax.Array) -> None:
        self._ref[...] = _times_rows(self._ref[...], factor)

    def read(self) -> jax.Array:
        return self._ref[...]


class _SharedAccumulator:
    """O in shared memory: the same results from what the interpreter knows."""

    def __init__(self, acc_smem: Any):
        self._acc = acc_smem
        self._acc[...] = jnp.zeros(acc_smem.shape, jnp.float32)

    def add(self, p: Any, v_smem: Any) -> None:
        def product(ref):
            plgpu.wgmma(ref, p, v_smem)
            return ref[...]

        self._acc[...] = self._acc[...] + pl.run_scoped(product, plgpu.ACC(self._acc.shape, jnp.float32))

    def scale(self, factor: jax.Array) -> None:
        self._acc[...] = _times_rows(self._acc[...], factor)

    def read(self) -> jax.Array:
        return self._acc[...]


def _times_rows(x: jax.Array, factor: jax.Array) -> jax.Array:
    return x * lax.broadcast_in_dim(factor, x.shape, [0])


@dataclasses.dataclass(frozen=True)
class Consumer:
    """One consumer: `wg` of its CTA, `number` of its cluster. scales_ref: [2], those of K and V, or None."""

    wg: jax.Array
    number: jax.Array
    out_ref: Any
    sinks_ref: Any
    scales_ref: Any
    layer: Layer
    memory: Memory

    def run(self) -> None:
        """Work on items until the record says that there are no more."""
        params, turn = self.layer.params, self.memory.turn
        # In these two places the barrier's number is asked for anew: as a constant its address would be kept, and
        # spilled, through the whole kernel.
        if params.take_turns:
            pl.when(self.wg == 1)(lambda: plgpu.barrier_arrive(turn.at[1 - lax.axis_index("wg")]))
        zero = jnp.int32(0)
        init = (zero, zero, self._await_item(zero))
        count, _, _ = lax.while_loop(lambda carry: carry[2], self._attend_item, init)
        if params.q_buffers > 1:
            pl.when(count > 0)(lambda: self._release(count - 1))
        if params.take_turns:
            pl.when(self.wg == 0)(lambda: plgpu.barrier_wait(turn.at[lax.axis_index("wg")]))
        plgpu.wait_smem_to_gmem(0)

    def _await_item(self, i: jax.Array) -> jax.Array:
        buffer = self.layer.params.buffer(i)
        plgpu.barrier_wait(self.memory.q_ready.at[buffer])
        return item_lists.is_item(self.memory.record.at[buffer])

    def _attend_item(self, carry: tuple) -> tuple:
        i, done, _ = carry
        if self.layer.params.has_overlap:
            done = self._attend(i, done, None)
        elif self.layer.params.accumulate_in_smem:
            done = self._attend(i, done, _SharedAccumulator(self.memory.acc.at[self.wg]))
        else:
            shape = (ROWS, self.layer.head_dim)
            done = pl.run_scoped(
                lambda ref: self._attend(i, done, _RegisterAccumulator(ref)), plgpu.ACC(shape, jnp.float32)
            )
        if self.layer.params.q_buffers == 1:
            self._release(i)
        return i + 1, done, self._await_item(i + 1)

    def _release(self, i: jax.Array) -> None:
        """Let the producer have the memory of an item once its output has been copied from there."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.memory.q_free.at[self.layer.params.buffer(i)])

    def _take_turn(self) -> None:
        if self.layer.params.take_turns:
            plgpu.barrier_wait(self.memory.turn.at[self.wg])

    def _pass_turn(self) -> None:
        if self.layer.params.take_turns:
            plgpu.barrier_arrive(self.memory.turn.at[1 - self.wg])

    def _attend(self, i: jax.Array, done: jax.Array, acc: Any) -> jax.Array:
        """The CTA's item i, after `done` K/V steps; returns the steps done after it."""
        layer, memory, params = self.layer, self.memory, self.layer.params
        stages, block_kv = params.num_stages, params.block_kv
        buffer = params.buffer(i)
        item = item_lists.Item.read(memory.record.at[buffer])
        position = item.position + item.part(self.number, layer.per_item)[1]
        q = memory.qo[0].at[buffer, self.wg]
        scores = plgpu.ACC((ROWS, block_kv), jnp.float32)

        def first_step(s_ref):
            slot = lax.rem(done, stages)
            plgpu.barrier_wait(memory.k_ready.at[slot])
            self._take_turn()
            plgpu.wgmma(s_ref, q, memory.k.at[slot].transpose((1, 0)))
            self._pass_turn()
            s = s_ref[...]
            plgpu.barrier_arrive(memory.k_free.at[slot])
            m = plgpu.layout_cast(jnp.full((ROWS,), MAX_FLOOR, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
            if params.has_overlap:
                total = plgpu.layout_cast(jnp.full((ROWS, 8), 0.0, jnp.float32), plgpu.Layout.WGMMA)
            else:
                total = plgpu.layout_cast(jnp.full((ROWS,), 0.0, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
            p, m, total, _ = self._softmax(s, m, total, position - item.first_step * block_kv)
            return self._hold(p, jnp.int32(0)), m, total

        def next_step(step, carry):
            p, m, total = carry
            number = step - item.first_step
            slot, last_slot = lax.rem(done + number, stages), lax.rem(done + number - 1, stages)

            def both(s_ref):
                plgpu.barrier_wait(memory.v_ready.at[last_slot])
                plgpu.barrier_wait(memory.k_ready.at[slot])
                self._take_turn()
                acc.add(self._held(p, number - 1), memory.v.at[last_slot])
                plgpu.wgmma(s_ref, q, memory.k.at[slot].transpose((1, 0)))
                self._pass_turn()
                return s_ref[...]

            s = pl.run_scoped(both, scores)
            plgpu.barrier_arrive(memory.k_free.at[slot])
            plgpu.barrier_arrive(memory.v_free.at[last_slot])
            p, m, total, alpha = self._softmax(s, m, total, position - step * block_kv)
            p = self._hold(p, number)
            acc.scale(alpha)
            return p, m, total

        def overlapped_step(step, carry):
            p, m, total, o = carry
            number = step - item.first_step
            slot, last_slot = lax.rem(done + number, stages), lax.rem(done + number - 1, stages)
            plgpu.barrier_wait(memory.k_ready.at[slot])
            plgpu.barrier_wait(memory.v_ready.at[last_slot])
            self._take_turn()
            s, o = products.issue(p, o, q_operand, memory.k.at[slot], memory.v.at[last_slot])
            self._pass_turn()
            s = products.await_scores(s)
            plgpu.barrier_arrive(memory.k_free.at[slot])
            p, m, total, alpha = self._softmax(s, m, total, position - step * block_kv)
            o = products.await_output(o, alpha, total, memory.pin.at[self.wg], is_rare=params.is_lazy)
            plgpu.barrier_arrive(memory.v_free.at[last_slot])
            return p, m, total, o

        q_operand = q
        carry = pl.run_scoped(first_step, scores)
        if params.q_buffers > 1:
            pl.when(i > 0)(lambda: self._release(i - 1))
        end = item.end_step
        last_slot = lax.rem(done + end - 1 - item.first_step, stages)
        if params.has_overlap:
            carry = (*carry, products.zeros(layer.head_dim))
            if params.q_in_registers:
                q_operand = products.load_queries(q)
            p, m, total, o = lax.fori_loop(item.first_step + 1, end, overlapped_step, carry)
            plgpu.barrier_wait(memory.v_ready.at[last_slot])
            out = products.read_output(products.issue_last(p, o, memory.v.at[last_slot]))
        else:
            p, m, total = lax.fori_loop(item.first_step + 1, end, next_step, carry)
            plgpu.barrier_wait(memory.v_ready.at[last_slot])
            acc.add(self._held(p, end - 1 - item.first_step), memory.v.at[last_slot])
            out = acc.read()
        plgpu.barrier_arrive(memory.v_free.at[last_slot])
        self._finish(out, m, total, buffer)
        return done + end - item.first_step

    def _hold(self, p: jax.Array, number: jax.Array) -> jax.Array | None:
        """Keep the probabilities of an item's n-th step for its product with V, in registers or in shared memory."""
        if not self.layer.params.has_p_in_smem:
            return p
        self.memory.p.at[self.wg, lax.rem(number, 2)][...] = p
        plgpu.commit_smem()
        return None

    def _held(self, p: jax.Array | None, number: jax.Array) -> Any:
        return self.memory.p.at[self.wg, lax.rem(number, 2)] if p is None else p

    def _softmax(self, s: jax.Array, m: jax.Array, total: jax.Array, distance: jax.Array) -> tuple:
        """(probabilities, maximum, sum, factor by which earlier results shrink) of a step.

        distance: from the tile's first key to the first query. m, total: so far.
        """
        scale, softcap, window = self.layer.scale, self.layer.softcap, self.layer.window
        if self.scales_ref is not None:
            scale = scale * self.scales_ref[0]
        to_log2 = LOG2E * scale
        if softcap is not None:
            s, to_log2 = jnp.tanh(s * (scale / softcap)) * softcap, LOG2E
        # Most tiles are seen whole by every query of this consumer.
        has_unseen = distance < s.shape[1] - 1
        if window is not None:
            has_unseen |= distance + ROWS > window
        s = lax.cond(has_unseen, functools.partial(self._mask, distance), lambda s: s, s)
        m_new = jnp.maximum(m, s.max(axis=1) * to_log2)
        if self.layer.params.is_lazy:
            m_new = jnp.where(m_new - m > MAX_RISE, m_new, m)
        alpha = jnp.exp2(m - m_new)
        p = jnp.exp2(s * to_log2 - lax.broadcast_in_dim(m_new, s.shape, [0]))
        if self.layer.params.has_overlap:
            total = _times_rows(total, alpha) + products.column_sums(p)
        else:
            total = total * alpha + p.sum(axis=1)
        return p.astype(self.memory.v.dtype), m_new, total, alpha

    def _mask(self, distance: jax.Array, s: jax.Array) -> jax.Array:
        if self.layer.params.has_overlap:
            return products.mask(s, distance, window=self.layer.window, masked=NEG_INF)
        iota = functools.partial(plgpu.broadcasted_iota, jnp.int32, s.shape, layout=plgpu.Layout.WGMMA)
        distances = distance + iota(0) - iota(1)
        seen = distances >= 0
        if self.layer.window is not None:
            seen &= distances < self.layer.window
        return jnp.where(seen, s, NEG_INF)

    def _finish(self, out: jax.Array, m: jax.Array, total: jax.Array, buffer: jax.Array) -> None:
        """Normalise and write an item's output."""
        item = item_lists.Item.read(self.memory.record.at[buffer])  # again: not worth registers through the loop
        head, offset = item.part(self.number, self.layer.per_item)
        if self.layer.params.has_overlap:
            total = total.sum(axis=1)
        factor = 1 / total
        if self.sinks_ref is not None:
            sink = self.sinks_ref[head]
            m_new = jnp.maximum(m, sink)
            alpha = jnp.exp2(m - m_new)
            factor = alpha / (total * alpha + jnp.exp2(sink - m_new))
        if self.scales_ref is not None:
            factor = factor * self.scales_ref[1]
        out = _times_rows(out, factor).astype(self.out_ref.dtype)
        low, high = (jnp.clip(x - offset, 0, ROWS) for x in (item.low, item.high))
        self._store(out, item.token + offset, head, low, high - low, buffer)

    def _store(
        self, out: jax.Array, token: jax.Array, head: jax.Array, low: jax.Array, count: jax.Array, buffer: jax.Array
    ) -> None:
        """Write rows [low, low + count) of a tile whose first row is `token`."""
        qo = self.memory.qo
        swizzled, plain = (ref.at[buffer, self.wg] for ref in (qo[max(len(qo) - 2, 0)], qo[-1]))
        if self.layer.params.accumulate_in_smem:
            swizzled = plain

        @pl.when(count == ROWS)
        def _whole():
            swizzled[...] = out
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(swizzled, self.out_ref.at[pl.ds(token, ROWS), head])

        @pl.when(count < ROWS)
        def _part():
            plain[...] = out
            plgpu.commit_smem()
            if self.layer.params.accumulate_in_smem:
                lax.fori_loop(low, low + count, lambda i, _: self._copy_row(plain, i, token, head), None)
            else:
                copy_rows_out(plain, self.out_ref, token, head, low, count)

    def _copy_row(self, tile: Any, row: jax.Array, token: jax.Array, head: jax.Array) -> None:
        plgpu.copy_smem_to_gmem(tile.at[pl.ds(row, 1)], self.out_ref.at[pl.ds(token + row, 1), head])


def attend_items(out_ref: Any, sinks_ref: Any, scales_ref: Any, layer: Layer, memory: Memory) -> None:
    """A consumer's whole run."""
    wg = lax.axis_index("wg")
    number = wg if layer.params.ctas == 1 else lax.axis_index("rank") * CONSUMERS + wg
    Consumer(wg, number, out_ref, sinks_ref, scales_ref, layer, memory).run()
