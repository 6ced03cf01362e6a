"""The producer of the prefill kernel: claims items and brings their queries, keys and values to shared memory.

    item i     record, Q | K0 V0 K1 V1 ...           through the rings of stages, then item i + 1 without a pause

A cache in fp8 arrives as it is, one tile of K and one of V at a time, and is written to the rings as f16, which holds
e4m3 exactly (Hopper converts to f16 only):

    K tile     TMA ........ | convert |  TMA of the next ........ | convert | ...
    V tile       TMA ........         | convert | TMA of the next ........  | convert | ...
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
from jaxinfer.kernels.paged_attention.mosaic_gpu_common import TMA_ALIGNMENT, copy_layout, copy_rows, zero_rows_outside
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_memory import Layer, Memory
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_plan import CONSUMERS, ROWS

MAX_PAGES_AHEAD = 4


def load_items(
    q_ref: Any, k_ref: Any, v_ref: Any, block_tables_ref: Any, items: item_lists.ItemList, layer: Layer, memory: Memory
) -> None:
    """The producer's whole run."""
    q_buffers = layer.params.q_buffers
    queries, *_ = memory.qo
    claims = memory.record.at[pl.ds(q_buffers, 2), pl.ds(0, 1)]
    first_consumer = 0 if layer.params.ctas == 1 else lax.axis_index("rank") * CONSUMERS
    load_keys = _load_converted if layer.is_fp8 else _load_directly

    def await_buffer(i):
        @pl.when(i >= q_buffers)
        def _():
            plgpu.barrier_wait(memory.q_free.at[layer.params.buffer(i)])

        return layer.params.buffer(i)

    def load_item(carry):
        i, done, index = carry
        row, item = items.read(index)
        buffer = await_buffer(i)
        item.write(memory.record.at[buffer])
        plgpu.barrier_arrive(memory.q_ready.at[buffer])
        for consumer in range(CONSUMERS):
            head, offset = item.part(first_consumer + consumer, layer.per_item)
            plgpu.copy_gmem_to_smem(
                q_ref.at[pl.ds(item.token + offset, ROWS), head],
                queries.at[buffer, consumer],
                memory.q_ready.at[buffer],
            )
        done = load_keys(k_ref, v_ref, _Pages(block_tables_ref, row, item, layer), done, memory)
        return i + 1, done, items.deal(i + 1, claims, memory.claimed)

    zero = jnp.int32(0)
    init = (zero, zero, items.deal(zero, claims, memory.claimed))
    count, done, _ = lax.while_loop(lambda carry: carry[2] < items.total, load_item, init)
    buffer = await_buffer(count)
    item_lists.write_end(memory.record.at[buffer])
    for _ in range(CONSUMERS + 1):
        plgpu.barrier_arrive(memory.q_ready.at[buffer])
    _drain(count, done, layer, memory)


def _drain(count: jax.Array, done: jax.Array, layer: Layer, memory: Memory) -> None:
    """Wait for the last completion of every barrier: before it, nobody may leave."""
    stages, q_buffers = layer.params.num_stages, layer.params.q_buffers

    def drain_kv(i, _):
        plgpu.barrier_wait(memory.k_free.at[lax.rem(i, stages)])
        plgpu.barrier_wait(memory.v_free.at[lax.rem(i, stages)])

    def drain_q(i, _):
        plgpu.barrier_wait(memory.q_free.at[layer.params.buffer(i)])

    lax.fori_loop(jnp.maximum(done - stages, 0), done, drain_kv, None)
    lax.fori_loop(jnp.maximum(count - q_buffers + 1, 0), count, drain_q, None)


@dataclasses.dataclass(frozen=True)
class _Pages:
    """Block ids of an item's steps. They are read a step ahead, if they are not too many for the registers."""

    block_tables_ref: Any
    row: jax.Array
    item: item_lists.Item
    layer: Layer

    def read(self, step: jax.Array) -> tuple:
        """Block ids of a step's copies; past the row's end its last real block again."""
        block_size, block_kv = self.layer.block_size, self.layer.params.block_kv
        step, last = jnp.minimum(step, self.item.end_step - 1), (self.item.seq_len - 1) // block_size
        tokens = [step * block_kv + i * self.layer.copy_tokens for i in range(self.layer.num_copies)]
        return tuple(self.block_tables_ref[self.row, jnp.minimum(token // block_size, last)] for token in tokens)

    def read_ahead(self, step: jax.Array) -> tuple:
        return self.read(step) if self.layer.num_copies <= MAX_PAGES_AHEAD else ()


def _used_keys(item: item_lists.Item, step: jax.Array, layer: Layer) -> tuple:
    """The range [low, high) of a tile's keys that some query of the item sees, and whether there are others.

    Values outside must become 0: unused slots may hold NaN, and 0 x NaN is NaN.
    """
    first_key = step * layer.params.block_kv
    high = item.seq_len - first_key
    if layer.window is None:
        return 0, high, high < layer.params.block_kv
    low = item.position + item.low - layer.window + 1 - first_key
    return low, high, (high < layer.params.block_kv) | (low > 0)


def _copy_tile(
    source: Any,
    smem: Any,
    barrier: Any,
    *,
    layer: Layer,
    ids: tuple,
    head: jax.Array,
    step: jax.Array,
    **options: Any,
) -> None:
    block_kv, block_size = layer.params.block_kv, layer.block_size
    assert layer.copy_tokens * layer.head_dim * jnp.dtype(source.dtype).itemsize % TMA_ALIGNMENT == 0
    offset = lax.rem(step * block_kv, block_size) if block_size > block_kv else 0
    for i, page in enumerate(ids):
        plgpu.copy_gmem_to_smem(
            source.at[page, head, pl.ds(offset, layer.copy_tokens)],
            smem.at[pl.ds(i * layer.copy_tokens, layer.copy_tokens)],
            barrier,
            **options,
        )


def _load_directly(k_ref: Any, v_ref: Any, pages: _Pages, done: jax.Array, memory: Memory) -> jax.Array:
    """K and V tiles of an item, 16-bit caches."""
    item, layer = pages.item, pages.layer
    stages, head = layer.params.num_stages, item.head // layer.group
    options = {} if layer.params.ctas == 1 else {"collective_axes": "rank"}

    def load_step(step, carry):
        done, ids = carry
        slot = lax.rem(done, stages)
        ids, next_ids = ids or pages.read(step), pages.read_ahead(step + 1)
        copy = functools.partial(_copy_tile, layer=layer, ids=ids, head=head, step=step, **options)
        _await_free(memory.k_free, slot, done, stages)
        copy(k_ref, memory.k.at[slot], memory.k_ready.at[slot])
        _await_free(memory.v_free, slot, done, stages)
        low, high, has_unused = _used_keys(item, step, layer)
        copy(v_ref, memory.v.at[slot], memory.v_ready.at[jnp.where(has_unused, stages, slot)])

        @pl.when(has_unused)
        def _():
            plgpu.barrier_wait(memory.v_ready.at[stages])
            zero_rows_outside(memory.v.at[slot], low, high)
            plgpu.commit_smem()
            for _ in range(layer.num_copies):
                plgpu.barrier_arrive(memory.v_ready.at[slot])

        return done + 1, next_ids

    init = (done, pages.read_ahead(item.first_step))
    return lax.fori_loop(item.first_step, item.end_step, load_step, init)[0]


def _load_converted(k_ref: Any, v_ref: Any, pages: _Pages, done: jax.Array, memory: Memory) -> jax.Array:
    """K and V tiles of an item, fp8 caches."""
    item, layer = pages.item, pages.layer
    stages, head = layer.params.num_stages, item.head // layer.group
    copy = functools.partial(_copy_tile, layer=layer, head=head)
    tensors = (
        (k_ref, memory.raw_k, memory.k, memory.k_ready, memory.k_free),
        (v_ref, memory.raw_v, memory.v, memory.v_ready, memory.v_free),
    )

    def load_step(step, carry):  # beginning one step early, when there is nothing to convert yet
        done, next_ids = carry
        slot = lax.rem(done, stages)
        next_ids, following = next_ids or pages.read(step + 1), pages.read_ahead(step + 2)
        is_real = step >= item.first_step
        for i, (source, raw, smem, ready, free) in enumerate(tensors):

            @pl.when(is_real)
            def _(i=i, source=source, raw=raw, smem=smem, ready=ready, free=free):
                plgpu.barrier_wait(memory.raw_ready.at[i])
                _await_free(free, slot, done, stages)
                _convert(raw, smem.at[slot])
                if source is v_ref:
                    low, high, has_unused = _used_keys(item, step, layer)
                    pl.when(has_unused)(lambda: zero_rows_outside(smem.at[slot], low, high))
                plgpu.commit_smem()
                plgpu.barrier_arrive(ready.at[slot])

            @pl.when(step + 1 < item.end_step)
            def _(i=i, source=source, raw=raw):
                copy(source, raw, memory.raw_ready.at[i], ids=next_ids, step=step + 1)

        return done + is_real.astype(jnp.int32), following

    init = (done, pages.read_ahead(item.first_step))
    return lax.fori_loop(item.first_step - 1, item.end_step, load_step, init)[0]


def _await_free(free: Any, slot: jax.Array, done: jax.Array, stages: int) -> None:
    @pl.when(done >= stages)
    def _():
        plgpu.barrier_wait(free.at[slot])


def _convert(raw: Any, smem: Any) -> None:
    rows, columns = raw.shape
    itemsize = jnp.dtype(smem.dtype).itemsize
    size, layout = copy_rows(columns, itemsize), copy_layout(columns, itemsize)
    for row in range(0, rows, size):
        part = pl.ds(row, size)
        smem[part] = plgpu.load(raw.at[part], layout=layout).astype(smem.dtype)
