"""What of a model lies where on a mesh, and how many bytes that is on a device."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxinfer.sharding.parameters import abstract_parameters, logical_axes
from jaxinfer.sharding.placement import device_bytes


@dataclass(frozen=True)
class Line:
    """Parameters that differ in their layer alone."""

    name: str  # a star stands for the layer
    count: int
    axes: str  # logical, with the mesh axis that divides one
    whole: tuple[int, ...]
    part: tuple[int, ...]  # on one device
    num_bytes: int  # of all `count` on one device


def lines(model: nnx.Module, mesh: Mesh) -> list[Line]:
    """What lies where, in the order of the model's parameters.

    Args:
      model: with logical axes; its shapes are those on the mesh (`jaxinfer.models.build_model`).
      mesh: with the axes of `jaxinfer.sharding.mesh`; a stage's own where the model is one
        (`jaxinfer.models.cut_stages`).

    Raises:
      ValueError: a dimension that the mesh does not divide, or a mesh of several stages.
    """
    if mesh.shape["pipe"] > 1:
        raise ValueError(f"pipe={mesh.shape['pipe']} means stages: describe each on its own mesh, see cut_stages")
    found: dict[str, Line] = {}
    variables = nnx.to_flat_state(nnx.state(model))
    for (path, variable), leaf in zip(variables, abstract_parameters(model, mesh), strict=True):
        assert isinstance(leaf.sharding, NamedSharding)
        name = ".".join("*" if isinstance(part, int) else str(part) for part in path)
        known = found.get(name)
        count, num_bytes = (known.count, known.num_bytes) if known else (0, 0)
        axes = ", ".join(
            f"{axis}/{mesh_axis}={mesh.shape[mesh_axis]}"
            if mesh_axis and mesh.shape[mesh_axis] > 1
            else str(axis or "-")
            for axis, mesh_axis in zip(logical_axes(variable), leaf.sharding.spec, strict=True)
        )
        part = leaf.sharding.shard_shape(leaf.shape)
        found[name] = Line(name, count + 1, axes, leaf.shape, part, num_bytes + device_bytes(leaf))
    return list(found.values())


def table(model: nnx.Module, mesh: Mesh) -> str:
    """`lines` as text, and the sums. See there for the arguments and errors."""
    listed = lines(model, mesh)
    rows = [("parameter", "axes", "whole", "on a device", "MB a device")]
    for line in listed:
        name = line.name if line.count == 1 else f"{line.count} x {line.name}"
        whole, part = (" x ".join(map(str, shape)) for shape in (line.whole, line.part))
        rows.append((name, line.axes, whole, part, f"{line.num_bytes / 1e6:,.2f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    used = ", ".join(f"{name}={size}" for name, size in mesh.shape.items() if size > 1) or "one device"
    total = sum(line.num_bytes for line in listed)
    whole = sum(line.num_bytes * math.prod(line.whole) // math.prod(line.part) for line in listed)
    return "\n".join(
        [*text, f"{total / 1e6:,.2f} MB on each of {mesh.size} devices ({used}); the model has {whole / 1e6:,.2f} MB"]
    )


def describe(model: nnx.Module, mesh: Mesh) -> None:
    """Prints `table`."""
    print(table(model, mesh))
