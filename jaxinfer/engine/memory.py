"""The memory account: what takes device memory, and how many blocks of KV cache that leaves.

The pool's size is part of every step's shape, so it has to be known before anything is compiled. What the programs
need beside it is therefore estimated from above, and compared with `memory_analysis()` of the compiled programs
(`Programs.largest_temporaries`): where the estimate was too small, the pool shrinks and the ladder is compiled again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.batch import BatchShape
from jaxinfer.config import EngineConfig, ModelConfig
from jaxinfer.engine.kv_pool import block_bytes

type Device = Any
"""A `jax.Device`, which type checkers take for a variable."""

CPU_POOL_BYTES = 1 << 30
CPU_POOL_TOKENS = 8192
"""On a CPU the pool holds this many tokens, or one longest request if that is more: touching memory takes time."""
GRID_BITS = 6
"""Automatic sizes keep this many leading bits (a loss below 2%): a program is found in the compilation cache again
although a few megabytes more or less were free."""
SPARE_BYTES = 256 << 20
"""Added to estimates: split products, work lists, what the allocator loses between buffers."""
HOLE_BYTES = tuple(256 << shift for shift in range(0, 12, 2))
NUM_HOLES = 48
"""Of each size, 17 MB on a device, and as much between them; arrays that stay fill some of them."""


@dataclass(frozen=True)
class MemoryAccount:
    """Where device memory goes, in bytes. On a CPU only weights and pool are accounted for."""

    total: int  # what the process may have: JAX's limit, which is its preallocated share
    others: int  # in use before the engine came
    weights: int
    temporaries: int  # of the largest program, and what steps leave for the sampler
    tables: int  # by request slot: block tables, carry, the sampler's features and history
    reserve: int  # what `memory_utilization` leaves alone
    block: int
    num_blocks: int

    @property
    def pool(self) -> int:
        return self.block * self.num_blocks

    @property
    def terms(self) -> dict[str, int]:
        """Name -> bytes, in the order in which memory is given away; "unused" is the rest."""
        taken = {
            "in use by others": self.others,
            "weights": self.weights,
            "step and sampler temporaries": self.temporaries,
            "tables by request slot": self.tables,
            "KV cache": self.pool,
            "reserve": self.reserve,
        }
        return {**taken, "unused": max(self.total - sum(taken.values()), 0)}

    def describe(self) -> str:
        """One line a term."""
        lines = [f"{name:<30}{size / 1e9:10.3f} GB" for name, size in self.terms.items()]
        return "\n".join([*lines, f"{'total':<30}{self.total / 1e9:10.3f} GB  ({self.num_blocks} blocks)"])


def estimate_temporaries(model: ModelConfig, largest: BatchShape, engine: EngineConfig) -> int:
    """An upper bound of what the largest program needs beside its arguments and results, in bytes.

    A layer keeps a few activations of each width, which XLA reuses for the next layer; the full sampler a few copies
    of the logits; a copy of blocks all that it copies.

    Args:
      model: on a mesh, one device's part of it. (A sampler that needs whole rows has as much of the logits, as some
        rows.)
    """
    assert engine.block_size is not None
    itemsize = jnp.dtype(engine.dtype).itemsize
    attention = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    widths = 6 * model.hidden_size + 3 * attention + 3 * model.intermediate_size
    step = largest.num_tokens * widths * itemsize
    sampler = 6 * largest.num_rows * model.vocab_size * 4
    copies = largest.num_rows * block_bytes(model, engine.block_size, engine.cache_dtype)
    return max(step, sampler, copies) + SPARE_BYTES


def fullest(devices: Sequence[Device]) -> Device:
    """The device with the least memory left, which bounds what all of a mesh can hold."""

    def free(device: Device) -> int:
        stats = device.memory_stats() or {}
        return stats.get("bytes_limit", 0) - stats.get("bytes_in_use", 0)

    return devices[0] if devices[0].platform == "cpu" else min(devices, key=free)


def size_pool(
    engine: EngineConfig,
    config: ModelConfig,
    *,
    weights: int,
    temporaries: int,
    tables: int,
    device: Device,
    others: int | None = None,
) -> MemoryAccount:
    """How many blocks there will be: what was asked for, or what memory holds.

    Args:
      engine: resolved.
      config: on a mesh, one device's part of the model; all bytes are a device's.
      weights: bytes of the parameters on the device.
      temporaries: of programs; see `estimate_temporaries`.
      tables: of the arrays by request slot.
      others: bytes in use by others; None asks the device, before weights are loaded.

    Raises:
      ValueError: not even two blocks fit; says what takes the memory.
    """
    assert engine.block_size is not None
    assert engine.max_num_seqs is not None
    block = block_bytes(config, engine.block_size, engine.cache_dtype)
    account = MemoryAccount(0, 0, weights, temporaries, tables, 0, block, engine.num_blocks or 0)
    longest = engine.max_model_len or config.max_position_embeddings
    if device.platform == "cpu":
        most, available = max(longest, CPU_POOL_TOKENS), CPU_POOL_BYTES
        account = dataclasses.replace(account, temporaries=0, tables=0)
    else:
        most = engine.max_num_seqs * longest
        stats = device.memory_stats() or {}
        total = stats.get("bytes_limit", 0)
        others = stats.get("bytes_in_use", 0) if others is None else others
        reserve = total - int(total * engine.memory_utilization)
        account = dataclasses.replace(account, total=total, others=others, reserve=reserve)
        available = total - others - weights - temporaries - tables - reserve
    if engine.num_blocks is None:
        wanted = -(-most // engine.block_size) + 1
        account = dataclasses.replace(account, num_blocks=min(wanted, _on_grid(available // block)))
        if account.num_blocks < 2:
            raise ValueError(_refusal(account, engine.memory_utilization))
    if device.platform == "cpu":
        account = dataclasses.replace(account, total=account.pool + weights)
    return account


def _on_grid(num_blocks: int) -> int:
    """Rounded down to `GRID_BITS` leading bits; small pools stay as they are."""
    step = 1 << max(num_blocks.bit_length() - GRID_BITS - 1, 0)
    return num_blocks // step * step if num_blocks > 0 else 0


def _refusal(account: MemoryAccount, utilization: float) -> str:
    taken = {name: size for name, size in account.terms.items() if name not in ("KV cache", "unused") and size}
    largest = max((name for name in taken if name != "reserve"), key=taken.__getitem__)
    parts = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in taken.items())
    return (
        f"no room for a KV cache: of {account.total / 1e9:.1f} GB ({utilization:.0%} to be used) are taken: {parts}; "
        f"the largest is {largest}; a block takes {account.block / 1e6:.2f} MB and two are needed"
    )


def leave_holes(devices: Sequence[Device]) -> list[jax.Array]:
    """Makes small free places in the memory of GPUs, each between arrays that are to be kept: those are returned.

    Some small arrays live as long as a step is in flight: its plan, its tokens. XLA's allocator puts an array into the
    smallest free place, and where none is small, cuts it off the place that the temporaries of programs have had. These
    then begin elsewhere in every step, and a command buffer whose temporaries have moved is updated node by node: 3.3
    ms of the host for a step of an 8B model over two H200s (docs/performance.md).
    """
    kept: list[jax.Array] = []
    for device in devices:
        if device.platform == "gpu":
            for size in HOLE_BYTES:
                kept += every_other(device, size, NUM_HOLES)
    return kept


def every_other(device: Device, size: int, count: int) -> list[jax.Array]:
    """Puts 2 x count + 1 arrays of `size` bytes on a device, and frees every second one. As soon as no smaller place is
    free, they lie side by side."""
    arrays = [jax.device_put(np.zeros(size, np.uint8), device) for _ in range(2 * count + 1)]
    jax.block_until_ready(arrays)
    for array in arrays[1::2]:
        array.delete()
    return arrays[::2]
