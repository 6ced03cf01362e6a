"""`all_reduce` and `all_reduce_norm` for Hopper GPUs of one host: one launch, one trip over NVLink, no flags.

    rank 0, block t                                  rank 1, block t            (a block a row, 128 threads)
    x[t] -> registers                                x[t] -> registers
      store -----------> slot [t, parity, 0] of rank 1
                         slot [t, parity, 1] of rank 0 <------------ store
    poll the own slots until no word is EMPTY        poll ...
    set the words just read back to EMPTY            set ...
    x0 + x1 + ..., in float32, rank 0 first          the same sum, in the same order

The data are their own flag. A word of 32 bits, two elements, is EMPTY (0x8000 8000, twice -0) until its data arrive;
senders add +0, which turns -0 into +0 and leaves all else, so that no message contains EMPTY. A word arrives whole,
and nothing is assumed about the order in which words arrive. Every rank sends its whole message to every other:
(ranks - 1) messages in, as many out.

**Memory.** A `Channel` is made once, on the host: on each device, slots [row, parity, rank, hidden], all EMPTY, and
counters [row, thread], all 0. Addresses are fixed while it lives. Kernels get them in a small table, and only write
through it: XLA takes the channel for an input that nobody changes, so no copy that it may make could be mistaken for
the memory. (`plgpu.remote_ref` finds peers' addresses too, but by an exchange between the hosts' threads and a copy
to the device for each call and run, and by a barrier kernel before each call: see docs/kernels.md.)

**Order.** The parity of a message is that of its row's counter, which the kernel counts up in the same memory. So the
n-th message of row t meets the n-th of row t on every rank, in whatever program it is, and whatever other rows or
lengths there were, if all ranks make the same calls in the same order. Nothing is carried from program to program.

**Why nothing is overwritten.** Let a rank be in message n of a row. It leaves n only when it has n from all others,
so every other rank has begun n, which it does after its whole launch of n - 1 has ended. Hence two ranks are at most
one message apart, and when rank a sends n + 2, into the slots of n's parity:
  1. a has received n + 1 from b, so b has begun n + 1, and its launch of n has ended: b has read n, and has set those
     words to EMPTY. (Launches of a device end before the next begins, so these stores are ordered before a's.)
  2. While b is in n, a may already send n + 1: that is the other parity. One parity would not do.
A word of parity p is thus EMPTY, then n's, read once, EMPTY, n + 2's. No message is lost when a rank is early: slots
are EMPTY between messages whether or not any program runs, and no launch begins by clearing them.

**Progress.** A block sends all before it waits, and waits for the block of the same number elsewhere, so all blocks
of a launch must be resident at once (at most `MAX_ROWS`). A waiting kernel occupies its device. Programs must be
loaded on all devices before any runs, since loading can block while a kernel elsewhere waits: XLA sees to it for
programs that hold one of its own collectives.

**After an abort.** Programs run on all ranks or on none. Where one never comes, the others trap after about a minute
(`MAX_POLLS`), which ends the use of the device by this process. After a program that failed on some ranks only, slots
may hold half a message and counters may differ: make a new channel.

The bound is latency: one load, one NVLink crossing, one poll, and a launch. A message of 64 x 4096 in bf16 is 512 KiB
a direction, about 1.3 us of NVLink's 450 GB/s.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.all_reduce.channel import Channel
from jaxinfer.kernels.all_reduce.mosaic_gpu_slots import THREADS, Slots

DTYPES = (jnp.bfloat16, jnp.float16)
MAX_ROWS = 256
"""Blocks of `THREADS` that an H200 holds at once, whatever their registers: two a multiprocessor."""


MAX_GATHERED = 32768
"""Elements of a row from all ranks, which a thread block holds in registers."""


def check_supported(rows: int, hidden: int, dtype: jnp.dtype, ranks: int) -> None:
    """Raise NotImplementedError, with the values, for what the kernel cannot do."""
    if dtype not in DTYPES:
        raise NotImplementedError(f"messages of {dtype}: bf16 or f16")
    if hidden % (2 * THREADS) or hidden > 8192:
        raise NotImplementedError(f"rows of {hidden} elements: a multiple of {2 * THREADS} up to 8192")
    if hidden * ranks > MAX_GATHERED:
        raise NotImplementedError(f"rows of {hidden} elements from {ranks} ranks: at most {MAX_GATHERED} together")
    if rows > MAX_ROWS:
        raise NotImplementedError(f"{rows} rows, at most {MAX_ROWS}")


def all_reduce(x: jax.Array, channel: Channel) -> jax.Array:
    """See `api.all_reduce`."""
    _check(x, channel)
    body = functools.partial(_sum_kernel, channel=channel)
    launch = _launch(body, "all_reduce", x.shape[0], x, unsafe_no_auto_barriers=True)  # threads share nothing
    return launch(x, channel.addresses, channel.memory)


def all_reduce_norm(
    x: jax.Array, residual: jax.Array, weight: jax.Array, channel: Channel, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `api.all_reduce_norm`."""
    _check(x, channel)
    body = functools.partial(_norm_kernel, channel=channel, eps=eps)
    launch = _launch(body, "all_reduce_norm", x.shape[0], (x, residual))
    return launch(x, residual, weight, channel.addresses, channel.memory)


def _check(x: jax.Array, channel: Channel) -> None:
    rows, hidden = x.shape
    check_supported(rows, hidden, x.dtype, channel.ranks)
    if rows > channel.rows or hidden > channel.hidden or x.dtype != channel.dtype:
        wanted = f"{channel.dtype}[{channel.rows}, {channel.hidden}]"
        raise ValueError(f"a message {x.dtype}{x.shape} on a channel for {wanted}")


def _launch(body: Any, name: str, rows: int, like: Any, **params: Any) -> Callable[..., Any]:
    """A kernel that runs once for each call.

    XLA takes it for a function of its arguments, which may as well be computed twice: it does so where a result is
    written into a larger array, by a copy of the kernel that writes there ("dynamic-slice fusion"). So nothing sees the
    kernel behind its results.
    """
    launch = plgpu.kernel(
        body,
        out_type=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like),
        grid=(rows,),
        grid_names=("row",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane, **params),
    )
    return lambda *operands: lax.optimization_barrier(launch(*operands))


def _layout(hidden: int) -> Any:
    vector_size = next(size for size in (8, 4, 2) if hidden % (size * THREADS) == 0)
    return plgpu.Layout.WG_STRIDED((hidden,), vec_size=vector_size)


def _sum_kernel(x, addresses, _, out, *, channel: Channel) -> None:
    row = lax.axis_index("row")
    layout = _layout(x.shape[1])
    mine = plgpu.load(x.at[row], layout=layout, optimized=False)
    out[row] = _exchange(mine, addresses, row, channel, layout).astype(out.dtype)


def _norm_kernel(x, residual, weight, addresses, _, out, residual_out, *, channel: Channel, eps: float) -> None:
    row = lax.axis_index("row")
    layout = _layout(x.shape[1])
    mine, before, scales = (
        plgpu.load(ref, layout=layout, optimized=False) for ref in (x.at[row], residual.at[row], weight)
    )
    total = _exchange(mine, addresses, row, channel, layout)
    after = (before.astype(jnp.float32) + total).astype(before.dtype)
    residual_out[row] = after
    wide = after.astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide) / x.shape[1] + eps)
    out[row] = (wide * scale).astype(out.dtype) * scales


def _exchange(mine: jax.Array, addresses: Any, row: jax.Array, channel: Channel, layout: Any) -> jax.Array:
    """Sends a row to all other ranks and adds up theirs: float32, from rank 0 on."""

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct(mine.shape, jnp.float32, layout=layout),
    )
    def exchange(_, mine, table, row):
        slots = Slots(table, row.registers.item(), channel)
        slots.send(mine)
        return slots.receive_sum(mine)

    return exchange(mine, addresses.at[0], row)  # pyright: ignore[reportCallIssue]
