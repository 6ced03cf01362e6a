"""Device meshes: `--mesh tensor=2,data=2` as sizes, and as a `jax.sharding.Mesh` with named axes."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

AXES = ("data", "pipe", "expert", "tensor")
"""All axes, the outermost first: neighbouring devices, which talk fastest, share a tensor axis."""
IMPLEMENTED = ("data", "pipe", "tensor")
"""Axes that an engine can be run over; the others must have one place."""


def parse_mesh(text: str) -> dict[str, int]:
    """ "tensor=2,data=2" -> {"data": 2, "pipe": 1, "expert": 1, "tensor": 2}.

    Raises:
      ValueError: an unknown axis, one given twice, or a size that is not a positive integer.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, separator, number = (piece.strip() for piece in part.partition("="))
        if name not in AXES:
            near = difflib.get_close_matches(name, AXES, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; axes are {', '.join(AXES)}"
            raise ValueError(f"unknown mesh axis {name!r} in {text!r}{hint}")
        if name in sizes:
            raise ValueError(f"mesh axis {name} stands twice in {text!r}")
        if not separator or not number.isdecimal() or int(number) < 1:
            raise ValueError(f"mesh axis {name} needs a positive size, such as {name}=2, got {part.strip()!r}")
        sizes[name] = int(number)
    return {name: sizes.get(name, 1) for name in AXES}


def make_mesh(sizes: Mapping[str, int], devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with all of `AXES` over the first devices.

    Args:
      sizes: of the axes; missing ones are 1.
      devices: in the order in which they are dealt, the tensor axis first; None takes all of the default backend.

    Raises:
      ValueError: fewer devices than the mesh has places.
    """
    devices = jax.devices() if devices is None else devices
    shape = tuple(sizes.get(name, 1) for name in AXES)
    if math.prod(shape) > len(devices):
        wanted = " x ".join(f"{name}={size}" for name, size in zip(AXES, shape, strict=True) if size > 1)
        raise ValueError(f"mesh {wanted} needs {math.prod(shape)} devices, there are {len(devices)}")
    grid = np.empty(math.prod(shape), object)
    grid[:] = devices[: math.prod(shape)]
    return Mesh(grid.reshape(shape), AXES)


def resolve_mesh(setting: str | Mesh | None) -> Mesh | None:
    """The mesh that an engine runs on; None is the default device alone.

    Args:
      setting: text such as "tensor=2", a mesh whose axes are some of `AXES` in any order, or None.

    Raises:
      ValueError: what `parse_mesh` and `make_mesh` refuse, an axis that is not implemented, or, where several processes
        run, a mesh that does not lie in all of them.
    """
    if setting is None:
        if jax.process_count() > 1:
            raise ValueError(f"{jax.process_count()} processes need a mesh over their devices, such as {_whole()}")
        return None
    mesh = make_mesh(parse_mesh(setting)) if isinstance(setting, str) else _with_all_axes(setting)
    for name, size in mesh.shape.items():
        if size > 1 and name not in IMPLEMENTED:
            raise ValueError(
                f"mesh axis {name}={size} is not supported yet: only {', '.join(IMPLEMENTED)} may exceed 1"
            )
    if jax.process_count() > 1:
        _check_processes(mesh)
    is_default = mesh.size == 1 and mesh.devices.flat[0] == jax.devices()[0]
    return None if is_default else mesh


def _check_processes(mesh: Mesh) -> None:
    """Refuses what several processes cannot run in lockstep."""
    if mesh.shape["data"] > 1:
        raise ValueError(
            f"mesh axis data={mesh.shape['data']} over {jax.process_count()} processes is not supported: "
            "replicas exchange nothing, so start one run for each"
        )
    owners = {device.process_index for device in mesh.devices.flat}
    for process in range(jax.process_count()):
        if process not in owners:
            raise ValueError(
                f"the mesh of {mesh.size} devices has none of process {process}: "
                f"each of the {jax.process_count()} needs a part, as in {_whole()}"
            )


def _whole() -> str:
    """A mesh over all devices."""
    return f"tensor={jax.device_count()}"


def own_devices(mesh: Mesh | None) -> list[Any]:
    """The devices of a mesh that belong to this process, or its default device. A stage may have none here."""
    if mesh is None:
        return [jax.local_devices()[0]]
    return [device for device in mesh.devices.flat if device.process_index == jax.process_index()]


def _with_all_axes(mesh: Mesh) -> Mesh:
    """A user's mesh with the axes of `AXES`, in their order."""
    unknown = [name for name in mesh.axis_names if name not in AXES]
    if unknown:
        raise ValueError(f"unknown mesh axis {unknown[0]!r}; axes are {', '.join(AXES)}")
    order = [mesh.axis_names.index(name) for name in AXES if name in mesh.axis_names]
    shape = [mesh.shape.get(name, 1) for name in AXES]
    return Mesh(np.transpose(mesh.devices, order).reshape(shape), AXES)


def replica_meshes(mesh: Mesh | None) -> list[Mesh | None]:
    """One mesh a place on the data axis, each with the other axes whole."""
    if mesh is None or mesh.shape["data"] == 1:
        return [mesh]
    return [Mesh(mesh.devices[place : place + 1], mesh.axis_names) for place in range(mesh.shape["data"])]


def stage_meshes(mesh: Mesh | None) -> list[Mesh | None]:
    """One mesh a place on the pipe axis, each with the other axes whole."""
    if mesh is None or mesh.shape["pipe"] == 1:
        return [mesh]
    return [Mesh(mesh.devices[:, place : place + 1], mesh.axis_names) for place in range(mesh.shape["pipe"])]


def tensor_axis(mesh: Mesh | None) -> str | None:
    """The name of the tensor axis for collectives, None where it has one place."""
    return "tensor" if mesh is not None and mesh.shape["tensor"] > 1 else None
