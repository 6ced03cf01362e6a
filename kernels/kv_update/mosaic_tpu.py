"""`kv_update` for TPUs: read, merge and write back the tiles of the caches that the new rows fall into.

A DMA moves whole tiles of `TILE` slots and a slot is one sublane of a tile, so a row cannot be written alone:

    cache tile  [kv_heads, TILE, head_dim]     slots  0 1 2 3 4 5 6 7
    new rows of this tile (a run)                         a b     c        merged in VMEM, written back once

Tokens come in chunks, one grid step each. Within a chunk they are sorted by slot, so that every tile is one run and
no two copies in flight touch the same tile; between chunks all writes are awaited. Runs go round a ring of buffers:

    run            r - BEHIND     ...   r                       ...   r + AHEAD
                   written back         merge, start writing          being read
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

TILE = 8  # slots; XLA keeps bf16 and f32 caches in HBM in tiles of (8, 128), which are contiguous
CHUNK = 128  # tokens of a grid step
AHEAD = 4  # runs being read
BEHIND = 4  # runs being written
RING = AHEAD + BEHIND
VMEM_BYTES = 12 << 20  # of the 16 MiB that XLA grants a kernel on the smallest TPU
SMEM_BYTES = 768 << 10  # of the plan; a TPU has 1 MiB
DTYPES = (jnp.bfloat16, jnp.float32)
NO_SLOT = jnp.iinfo(jnp.int32).max


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["slots", "order", "run_starts", "num_runs"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class UpdatePlan:
    """Which token goes where, by chunk; T is rounded up to whole chunks. Layers share it."""

    slots: jax.Array  # int32 [chunks * chunk]: slots of the tokens, sorted within a chunk
    order: jax.Array  # int32 [chunks * chunk]: the tokens' numbers within their chunk, in that order
    run_starts: jax.Array  # int32 [chunks * (chunk + 1)]: run r of a chunk has its sorted tokens starts[r] .. [r + 1]
    num_runs: jax.Array  # int32 [chunks]


def plan(slot_mapping: jax.Array) -> UpdatePlan:
    """The runs of a step, for caches of any block size that is a multiple of `TILE`.

    Args:
      slot_mapping: int32 [T], every slot within the cache. Of tokens with the same slot one wins.
    """
    (num_tokens,) = slot_mapping.shape
    chunk = min(CHUNK, num_tokens)
    chunks = -(-num_tokens // chunk)
    slots = jnp.pad(slot_mapping, (0, chunks * chunk - num_tokens), constant_values=NO_SLOT).reshape(chunks, chunk)
    order = lax.broadcasted_iota(jnp.int32, slots.shape, 1)
    slots, order = lax.sort((slots, order), dimension=1, num_keys=1)
    tiles = slots // TILE
    is_token = slots != NO_SLOT
    is_first = is_token & (jnp.pad(tiles[:, :-1], ((0, 0), (1, 0)), constant_values=-1) != tiles)
    run = jnp.where(is_token, jnp.cumsum(is_first, axis=1), chunk + 1)  # from 1
    numbers = jnp.arange(1, chunk + 2, dtype=jnp.int32)
    run_starts = jnp.sum(run[:, None, :] < numbers[None, :, None], axis=2, dtype=jnp.int32)
    num_runs = jnp.sum(is_first, axis=1, dtype=jnp.int32)
    return UpdatePlan(slots.reshape(-1), order.reshape(-1), run_starts.reshape(-1), num_runs)


def check_supported(k_cache: jax.Array, k: jax.Array) -> None:
    """Raise NotImplementedError, with the values, for what the kernel cannot do."""
    _, kv_heads, block_size, head_dim = k_cache.shape
    if k_cache.dtype not in DTYPES or k.dtype not in DTYPES:
        raise NotImplementedError(f"rows of {k.dtype} into a cache of {k_cache.dtype}: bf16 or f32")
    if block_size % TILE:
        raise NotImplementedError(f"block_size {block_size} is no multiple of {TILE}")
    if head_dim % 128:
        raise NotImplementedError(f"head_dim {head_dim} is no multiple of 128")
    if 3 * 4 * k.shape[0] > SMEM_BYTES:
        raise NotImplementedError(f"{k.shape[0]} rows: their plan exceeds {SMEM_BYTES} bytes of SMEM")
    if vmem_bytes(k_cache, k) > VMEM_BYTES:
        raise NotImplementedError(f"{kv_heads} KV heads of {head_dim}: {vmem_bytes(k_cache, k)} bytes of VMEM")


def vmem_bytes(k_cache: jax.Array, k: jax.Array) -> int:
    """What `kv_update` asks of VMEM: the ring, the new rows of a run, and two chunks of K and V."""
    _, kv_heads, _, head_dim = k_cache.shape
    tiles = 2 * kv_heads * TILE * head_dim * (RING * k_cache.dtype.itemsize + 4)
    sublanes = 32 // k.dtype.itemsize  # a token's heads are padded to whole registers
    rows = 2 * 2 * min(CHUNK, k.shape[0]) * -(-kv_heads // sublanes) * sublanes * head_dim * k.dtype.itemsize
    return tiles + rows


def kv_update(
    k_cache: jax.Array,
    v_cache: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slot_mapping: jax.Array,
    *,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    step_plan: UpdatePlan | None = None,
    interpret: pltpu.InterpretParams | bool = False,
) -> tuple[jax.Array, jax.Array]:
    """See `api.kv_update`. In place where the caller donates the caches.

    Args:
      step_plan: what `plan` made of this `slot_mapping`, or None.
      interpret: how to run without a TPU, for tests.
    """
    check_supported(k_cache, k)
    if k_scale is not None or v_scale is not None:
        raise NotImplementedError("k_scale and v_scale")
    step_plan = step_plan or plan(slot_mapping)
    num_tokens, kv_heads, head_dim = k.shape
    chunk = min(CHUNK, num_tokens)
    (num_chunks,) = step_plan.num_runs.shape
    if step_plan.slots.shape != (num_chunks * chunk,) or num_chunks != -(-num_tokens // chunk):
        raise ValueError(f"a plan for {step_plan.slots.shape[0]} tokens in {num_chunks} chunks, and {num_tokens} rows")
    new_rows = pl.BlockSpec((chunk, kv_heads, head_dim), lambda number, *_: (number, 0, 0))
    cache = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        functools.partial(_update_chunk, chunk=chunk),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(num_chunks,),
            in_specs=[new_rows, new_rows, cache, cache],
            out_specs=[cache, cache],
            scratch_shapes=[
                pltpu.VMEM((2, RING, kv_heads, TILE, head_dim), k_cache.dtype),
                pltpu.VMEM((2, kv_heads, TILE, head_dim), jnp.float32),
                pltpu.SemaphoreType.DMA((2, RING)),
                pltpu.SemaphoreType.DMA((2, RING)),
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(k_cache.shape, k_cache.dtype)] * 2,
        input_output_aliases={6: 0, 7: 1},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        interpret=interpret,
        name="kv_update",
    )(step_plan.slots, step_plan.order, step_plan.run_starts, step_plan.num_runs, k, v, k_cache, v_cache)


def _update_chunk(
    slots,  # SMEM, see UpdatePlan
    order,
    run_starts,
    num_runs,
    k,  # VMEM [chunk, kv_heads, head_dim]
    v,
    _k_cache,  # HBM, the same memory as the outputs
    _v_cache,
    k_cache,  # HBM [num_blocks, kv_heads, block_size, head_dim]
    v_cache,
    tiles,  # VMEM [2, RING, kv_heads, TILE, head_dim]: of K and of V
    rows,  # VMEM float32 [2, kv_heads, TILE, head_dim]: new rows in their places
    read_done,  # DMA semaphores [2, RING]
    write_done,
    *,
    chunk: int,
) -> None:
    block_size = k_cache.shape[2]
    number = pl.program_id(0)
    tokens, starts = number * chunk, number * (chunk + 1)
    runs = num_runs[number]

    def copies(run, *, is_write: bool):
        slot = slots[tokens + run_starts[starts + run]]
        block = lax.div(slot, block_size)
        first = pl.multiple_of(lax.div(lax.rem(slot, block_size), TILE) * TILE, TILE)
        stage = lax.rem(run, RING)
        made = []
        for i, cache in enumerate((k_cache, v_cache)):
            there, here = cache.at[block, :, pl.ds(first, TILE), :], tiles.at[i, stage]
            if is_write:
                made.append(pltpu.make_async_copy(here, there, write_done.at[i, stage]))
            else:
                made.append(pltpu.make_async_copy(there, here, read_done.at[i, stage]))
        return made

    def start(run, *, is_write: bool) -> None:
        for copy in copies(run, is_write=is_write):
            copy.start()

    def wait(run, *, is_write: bool) -> None:
        for copy in copies(run, is_write=is_write):
            copy.wait()

    def place(i, places):
        """Put the i-th sorted token's rows where they belong in the tile."""
        token, place = order[tokens + i], lax.rem(slots[tokens + i], TILE)
        for j, new in enumerate((k, v)):
            rows[j, :, pl.ds(place, 1), :] = new[token].astype(jnp.float32)[:, None, :]
        return places | (1 << place)

    def merge(run) -> None:
        # Bits, not values, decide: whatever an untouched slot holds stays as it is.
        places = lax.fori_loop(run_starts[starts + run], run_starts[starts + run + 1], place, jnp.int32(0))
        stage = lax.rem(run, RING)
        sublane = lax.broadcasted_iota(jnp.int32, rows.shape[1:], 1)
        is_new = (lax.shift_right_logical(jnp.broadcast_to(places, sublane.shape), sublane) & 1) == 1
        for i in range(2):
            tiles[i, stage] = jnp.where(is_new, rows[i].astype(tiles.dtype), tiles[i, stage])

    def step(run, _) -> None:
        pl.when(run >= BEHIND)(lambda: wait(run - BEHIND, is_write=True))  # frees the buffer of the next read
        pl.when(run + AHEAD < runs)(lambda: start(run + AHEAD, is_write=False))
        wait(run, is_write=False)
        merge(run)
        start(run, is_write=True)

    for run in range(AHEAD):
        pl.when(run < runs)(functools.partial(start, jnp.int32(run), is_write=False))
    lax.fori_loop(0, runs, step, None)
    lax.fori_loop(jnp.maximum(runs - BEHIND, 0), runs, lambda run, _: wait(run, is_write=True), None)
