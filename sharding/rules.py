"""Logical axes of parameters and the mesh axes they are split over. The one place that says so."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec

LOGICAL_TO_MESH: dict[str, str | None] = {
    "vocab": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
    "embed": None,
    "head_dim": None,
}


def partition_spec(axes: Sequence[str | None]) -> PartitionSpec:
    """Logical axis names of one array -> its `PartitionSpec`.

    Raises:
      ValueError: an unknown name, or two axes of the array on one mesh axis.
    """
    entries: list[str | None] = []
    for axis in axes:
        if axis is not None and axis not in LOGICAL_TO_MESH:
            raise ValueError(f"unknown logical axis {axis!r}; known are {', '.join(LOGICAL_TO_MESH)}")
        mesh_axis = LOGICAL_TO_MESH[axis] if axis is not None else None
        if mesh_axis is not None and mesh_axis in entries:
            raise ValueError(f"axes {tuple(axes)} map twice to mesh axis {mesh_axis!r}")
        entries.append(mesh_axis)
    return PartitionSpec(*entries)
