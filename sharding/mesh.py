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
