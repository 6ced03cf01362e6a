"""`Channel`: the memory through which the devices of a mesh axis exchange messages, and where the others' lies."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

NUM_PARITIES = 2
NUM_COUNTERS = 128
"""A counter for each thread of a row: how many messages this row was part of."""
EMPTY = np.uint32(0x80008000)
"""A word that no message contains: twice -0 in bf16 and f16. Senders send +0 for -0."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["memory", "addresses"], meta_fields=["rows", "hidden", "dtype"]
)
@dataclasses.dataclass(frozen=True)
class Channel:
    """Device memory at fixed addresses, which kernels of all ranks change without XLA's knowledge.

    It is an argument of programs like weights are: never donated, never returned by a program (XLA would copy it),
    sharded by `spec` under `shard_map`, and kept as long as any program may run. One channel serves any number of
    calls and programs, but only in one order: see `api.all_reduce`.
    """

    memory: jax.Array  # uint32 [devices, words]: receive slots, EMPTY between calls, then counters
    addresses: jax.Array  # uint32 [devices, 2 * ranks + 1]: where memory is, low and high words, of the own rank and
    # those after it, cyclically; then the own rank
    rows: int  # at most in a message
    hidden: int  # at most in a row, elements
    dtype: jnp.dtype

    @property
    def ranks(self) -> int:
        return self.addresses.shape[-1] // 2

    @property
    def slot_bytes(self) -> int:
        """Of one row from one rank."""
        return self.hidden * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """Of a row's slots: for each parity and rank."""
        return NUM_PARITIES * self.ranks * self.slot_bytes

    @staticmethod
    def spec(mesh: Mesh) -> PartitionSpec:
        """Of both arrays: a device has the row that is its own."""
        return PartitionSpec(tuple(mesh.axis_names))


def is_reachable(mesh: Mesh) -> bool:
    """Whether a channel can be made: all devices belong to this process, which names the memory of no other."""
    return all(device.process_index == jax.process_index() for device in mesh.devices.flat)


def connect(mesh: Mesh, axis_name: str, *, rows: int, hidden: int, dtype: jnp.dtype) -> Channel:
    """Allocates a channel on every device of `mesh` for the groups along `axis_name`. Not for use under `jit`.

    A program that was aborted while it ran can leave half a message behind: make a new channel then.

    Args:
      rows: of the largest message; each takes 2 x ranks x hidden elements on every device.
      hidden: elements of the longest row.
      dtype: bfloat16 or float16.

    Raises:
      NotImplementedError: not `is_reachable`.
    """
    if not is_reachable(mesh):
        raise NotImplementedError("devices of several processes: all_reduce runs over those of one")
    spec = NamedSharding(mesh, Channel.spec(mesh))
    devices, ranks = mesh.devices, mesh.shape[axis_name]
    dtype = jnp.dtype(dtype)
    words = rows * NUM_PARITIES * ranks * hidden * dtype.itemsize // 4

    def fill() -> jax.Array:
        counters = jnp.zeros((devices.size, rows * NUM_COUNTERS), jnp.uint32)
        return jnp.concatenate([jnp.full((devices.size, words), EMPTY, jnp.uint32), counters], axis=1)

    memory = jax.block_until_ready(jax.jit(fill, out_shardings=spec)())
    where = {shard.device: shard.data.unsafe_buffer_pointer() for shard in memory.addressable_shards}
    axis = mesh.axis_names.index(axis_name)
    table = np.empty((devices.size, 2 * ranks + 1), np.uint32)
    for row, place in enumerate(np.ndindex(devices.shape)):
        group = np.roll(devices[(*place[:axis], slice(None), *place[axis + 1 :])], -place[axis])
        table[row] = [*_words([where[device] for device in group]), place[axis]]
    addresses = jax.device_put(table, spec)
    return Channel(memory, jax.block_until_ready(addresses), rows, hidden, dtype)


def abstract(mesh: Mesh, axis_name: str, *, rows: int, hidden: int, dtype: jnp.dtype) -> Channel:
    """A channel's shapes and shardings, to compile for devices that are not there."""
    spec = NamedSharding(mesh, Channel.spec(mesh))
    dtype, ranks, count = jnp.dtype(dtype), mesh.shape[axis_name], math.prod(mesh.shape.values())
    words = rows * (NUM_PARITIES * ranks * hidden * dtype.itemsize // 4 + NUM_COUNTERS)
    memory = jax.ShapeDtypeStruct((count, words), jnp.uint32, sharding=spec)
    addresses = jax.ShapeDtypeStruct((count, 2 * ranks + 1), jnp.uint32, sharding=spec)
    return Channel(memory, addresses, rows, hidden, dtype)  # pyright: ignore[reportArgumentType]


def _words(addresses: list[int]) -> list[int]:
    return [word for address in addresses for word in (address & 0xFFFFFFFF, address >> 32)]
