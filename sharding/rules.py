"""Logical axes of parameters and activations, and the mesh axes they are split over. The one place that says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

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


def sharding_of(
    name: str, shape: Sequence[int], axes: Sequence[str | None], mesh: Mesh | AbstractMesh
) -> NamedSharding:
    """Where an array lies on a mesh.

    Args:
      name: for the error.
      shape: of the whole array.
      axes: a logical name a dimension.
      mesh: from `make_mesh`.

    Raises:
      ValueError: a dimension that its mesh axis does not divide, with both numbers; or `partition_spec`'s.
    """
    spec = partition_spec(axes)
    for size, axis, mesh_axis in zip(shape, axes, spec, strict=True):
        if mesh_axis is not None and size % mesh.shape[mesh_axis]:
            raise ValueError(f"{name}: {size} ({axis}) cannot be divided among {mesh_axis}={mesh.shape[mesh_axis]}")
    return NamedSharding(mesh, spec)


def local_shape(shape: Sequence[int], axes: Sequence[str | None], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The part of an array that one device holds, on a mesh of these sizes."""
    spec = partition_spec(axes)
    return tuple(
        size if mesh_axis is None else size // sizes.get(mesh_axis, 1)
        for size, mesh_axis in zip(shape, spec, strict=True)
    )
