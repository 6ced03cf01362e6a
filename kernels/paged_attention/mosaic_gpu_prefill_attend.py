"""The consumers of the prefill kernel: two warpgroups that multiply, each 64 query rows of every item.

    consumer 0   S1 = Q K1', O += P0 V0 |           | S2 = Q K2', O += P1 V1 | ...
                          | softmax 1 |                         | softmax 2 |
    consumer 1            | S1 = Q K1', O += P0 V0  |           | S2 = ...

The softmax of a step runs during the product with V of the step before, and the barriers `turn` make one consumer issue
its products while the other does its softmax, so the matrix units always have a product to work on: both from
FlashAttention 3 (arXiv 2407.08608). Running maxima are in units of log2.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.paged_attention import mosaic_gpu_prefill_items as item_lists
from jaxinfer.kernels.paged_attention.mosaic_gpu_common import LOG2E, copy_rows_out
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_interpreted import InterpretedProducts
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_memory import Layer, Memory
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_plan import CONSUMERS, ROWS
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_products import Products

# Where running maxima begin: far over a masked score, whose probability is then 0 in a row that saw none but such
# (from NEG_INF on it would be exp2 of the rounding error of 1e30), and far under any other.
MAX_FLOOR = -1e20
MAX_RISE = 8.0  # log2 of what probabilities may be before O is scaled again


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
        done = self._attend(i, done)
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

    def _products(self, buffer: jax.Array) -> Products | InterpretedProducts:
        params, memory, q_smem = self.layer.params, self.memory, self.memory.qo[0].at[buffer, self.wg]
        if params.is_interpreted:
            return InterpretedProducts(q_smem, memory.p.at[self.wg])
        return Products(q_smem, memory.pin.at[self.wg], params.q_in_registers)

    def _attend(self, i: jax.Array, done: jax.Array) -> jax.Array:
        """The CTA's item i, after `done` K/V steps; returns the steps done after it."""
        layer, memory, params = self.layer, self.memory, self.layer.params
        stages, block_kv = params.num_stages, params.block_kv
        buffer = params.buffer(i)
        item = item_lists.Item.read(memory.record.at[buffer])
        position = item.position + item.part(self.number, layer.per_item)[1]
        products = self._products(buffer)

        def first_step(s_ref):
            slot = lax.rem(done, stages)
            plgpu.barrier_wait(memory.k_ready.at[slot])
            self._take_turn()
            plgpu.wgmma(s_ref, products.q_smem, memory.k.at[slot].transpose((1, 0)))
            self._pass_turn()
            s = s_ref[...]
            plgpu.barrier_arrive(memory.k_free.at[slot])
            m = plgpu.layout_cast(jnp.full((ROWS,), MAX_FLOOR, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
            total = plgpu.layout_cast(jnp.full((ROWS, 8), 0.0, jnp.float32), plgpu.Layout.WGMMA)
            return self._softmax(products, s, m, total, position - item.first_step * block_kv)[:3]

        def next_step(step, carry):
            p, m, total, o = carry
            number = step - item.first_step
            slot, last_slot = lax.rem(done + number, stages), lax.rem(done + number - 1, stages)
            plgpu.barrier_wait(memory.k_ready.at[slot])
            plgpu.barrier_wait(memory.v_ready.at[last_slot])
            self._take_turn()
            s, o = products.issue(p, o, q, memory.k.at[slot], memory.v.at[last_slot])
            self._pass_turn()
            s = products.await_scores(s)
            plgpu.barrier_arrive(memory.k_free.at[slot])
            p, m, total, alpha = self._softmax(products, s, m, total, position - step * block_kv)
            o = products.await_output(o, alpha, total)
            plgpu.barrier_arrive(memory.v_free.at[last_slot])
            return p, m, total, o

        carry = pl.run_scoped(first_step, plgpu.ACC((ROWS, block_kv), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]
        if params.q_buffers > 1:
            pl.when(i > 0)(lambda: self._release(i - 1))
        q, end = products.queries(), item.end_step
        p, m, total, o = lax.fori_loop(item.first_step + 1, end, next_step, (*carry, products.zeros()))
        last_slot = lax.rem(done + end - 1 - item.first_step, stages)
        plgpu.barrier_wait(memory.v_ready.at[last_slot])
        out = products.last(p, o, memory.v.at[last_slot])
        plgpu.barrier_arrive(memory.v_free.at[last_slot])
        self._finish(out, m, total.sum(axis=1), buffer)
        return done + end - item.first_step

    def _softmax(self, products: Any, s: jax.Array, m: jax.Array, total: jax.Array, distance: jax.Array) -> tuple:
        """(probabilities, maximum, sums by column, factor by which earlier results shrink) of a step.

        The maximum stays what it was until a score exceeds it by MAX_RISE, so that most factors are 1.

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
        s = lax.cond(has_unseen, lambda s: products.mask(s, distance, window), lambda s: s, s)
        m_new = jnp.maximum(m, s.max(axis=1) * to_log2)
        m_new = jnp.where(m_new - m > MAX_RISE, m_new, m)
        alpha = jnp.exp2(m - m_new)
        p = jnp.exp2(s * to_log2 - lax.broadcast_in_dim(m_new, s.shape, [0]))
        total = _times_rows(total, alpha) + products.column_sums(p)
        return p.astype(self.memory.v.dtype), m_new, total, alpha

    def _finish(self, out: jax.Array, m: jax.Array, total: jax.Array, buffer: jax.Array) -> None:
        """Normalise and write an item's output."""
        item = item_lists.Item.read(self.memory.record.at[buffer])  # again: not worth registers through the loop
        head, offset = item.part(self.number, self.layer.per_item)
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
        if self.layer.params.is_interpreted:
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
            if self.layer.params.is_interpreted:
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
