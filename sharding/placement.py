"""Programs over a mesh: the whole of one runs in one `shard_map`, so its code sees a device's own shapes.

Abstract arrays say where they lie (`jax.ShapeDtypeStruct(..., sharding=)`); without a sharding they are whole on
every device. The results that a program donates back lie where its arguments did.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

REPLICATED = PartitionSpec()


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, REPLICATED)


def on_mesh(
    function: Callable[..., Any], arguments: tuple[Any, ...], results: Any, mesh: Mesh
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(a function over the whole mesh, its abstract arguments with their shardings).

    Args:
      function: on one device's parts of its arguments. Results that are replicated must be equal on all devices.
      arguments: pytrees of abstract arrays.
      results: pytree with an abstract array for each result that may be sharded, and anything for those that are not.
      mesh: where to run. With one device there is no `shard_map`.
    """
    placed = jax.tree.map(lambda leaf: placed_at(leaf, mesh), arguments)
    if mesh.size == 1:
        return function, placed
    in_specs, out_specs = jax.tree.map(_spec, placed), jax.tree.map(_spec, results)
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False), placed


def placed_at(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """The same array, replicated if it does not say where it lies."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or replicated(mesh))


def _spec(leaf: Any) -> PartitionSpec:
    sharding = getattr(leaf, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else REPLICATED


def zeros(tree: Any, mesh: Mesh | None) -> Any:
    """Zeros for a pytree of abstract arrays, each made where it lies."""

    def make(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        sharding = None if mesh is None else placed_at(leaf, mesh).sharding
        return jnp.zeros(leaf.shape, leaf.dtype, device=sharding)

    return jax.tree.map(make, tree)


def device_bytes(tree: Any) -> int:
    """Bytes that a pytree of arrays, abstract or not, takes on one device."""
    return sum(map(_leaf_bytes, jax.tree.leaves(tree)))


def _leaf_bytes(leaf: Any) -> int:
    sharding: Sharding | None = getattr(leaf, "sharding", None)
    shape = leaf.shape if sharding is None else sharding.shard_shape(leaf.shape)
    return math.prod(shape) * jnp.dtype(leaf.dtype).itemsize
