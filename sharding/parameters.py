"""A model's parameters by path: their logical axes, where they lie, and a table of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.sharding.rules import sharding_of


def abstract_parameters(model: nnx.Module, mesh: Mesh) -> list[jax.ShapeDtypeStruct]:
    """A model's parameters in leaf order, with the shardings that their logical axes mean on a mesh.

    Raises:
      ValueError: a dimension that the mesh does not divide, with both numbers.
    """
    return [_placed(path, variable, mesh) for path, variable in nnx.to_flat_state(nnx.state(model))]


def _placed(path: Sequence[Any], variable: Any, mesh: Mesh) -> jax.ShapeDtypeStruct:
    leaf, name = variable.get_value(), ".".join(map(str, path))
    sharding = sharding_of(name, leaf.shape, logical_axes(variable), mesh)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def logical_axes(variable: Any) -> Sequence[str | None]:
    """The names that the model gave a parameter's dimensions."""
    return variable.get_metadata()["axes"]
