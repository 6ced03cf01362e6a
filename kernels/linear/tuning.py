"""Parameters of the Hopper kernel, and for which products and how many rows it is known to beat XLA's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import pathlib

ATOM = 64  # columns of a swizzled tile, and wgmma's M
ROWS = 16  # rows of x come in multiples of this
MAX_SMEM = 224 * 1024
MAX_ROWS = 128
SPLITS = (1, 2, 4, 8)
DEFAULT_DEVICE = "NVIDIA H200"


@dataclasses.dataclass(frozen=True)
class Product:
    """What is multiplied: x [rows, size] with a weight [size, segments, columns]; segments is 2 for a gated one."""

    rows: int
    size: int
    segments: int
    columns: int


@dataclasses.dataclass(frozen=True)
class Params:
    """Tuning.

    block_n: output columns a cluster, a multiple of 64. splits: CTAs of a cluster, which share K. block_k: rows of a
    weight tile, a multiple of 64. num_stages: tiles in flight a CTA.
    resident: the CTAs of a cluster keep their share of x in shared memory and work out its norm together.
    overlap: launch while the kernel before still runs, and fetch the weight meanwhile, which must then be an argument
    of the program, not something that it computes. The interpreter does not know it.
    exchange: a cluster's partial sums go through "shared" memory, or "device" memory, which the interpreter can follow.
    """

    block_n: int = 64
    splits: int = 4
    block_k: int = 64
    num_stages: int = 4
    resident: bool = False
    overlap: bool = False
    exchange: str = "shared"

    def __post_init__(self) -> None:
        if self.block_n % ATOM or self.block_k % ATOM or self.block_n <= 0 or self.block_k <= 0:
            raise ValueError(f"block_n {self.block_n} and block_k {self.block_k} must be multiples of {ATOM}")
        if self.splits not in SPLITS:
            raise ValueError(f"splits must be one of {SPLITS}, got {self.splits}")
        if self.num_stages < 2:
            raise ValueError(f"num_stages must be at least 2, got {self.num_stages}")
        if self.exchange not in ("shared", "device"):
            raise ValueError(f"exchange must be shared or device, got {self.exchange!r}")

    def smem_bytes(self, product: Product, *, has_norm: bool = True) -> int:
        """Shared memory of a CTA, barriers apart."""
        num_tiles, depth = product.size // self.splits // self.block_k, product.size // self.splits
        is_resident = self.resident and has_norm
        stage = self.block_k * (product.segments * self.block_n + product.rows * (not is_resident)) * 2
        x = depth * product.rows * 2 if is_resident else 0
        sums = product.segments * product.rows * self.block_n * 4
        return min(self.num_stages, num_tiles) * stage + sums + x + 2 * depth * has_norm

    def check(self, product: Product, *, has_norm: bool = True) -> None:
        """Raise NotImplementedError, with the values, for a product that these parameters cannot do."""
        if product.rows % ROWS or not 0 < product.rows <= MAX_ROWS:
            raise NotImplementedError(f"{product.rows} rows are no multiple of {ROWS} up to {MAX_ROWS}")
        if product.columns % self.block_n or product.size % (self.splits * self.block_k):
            raise NotImplementedError(f"{product} cannot be cut by {self}")
        needed = self.smem_bytes(product, has_norm=has_norm)
        if needed > MAX_SMEM:
            raise NotImplementedError(f"{product} needs {needed} bytes of shared memory with {self}")


@functools.cache
def tuned_params(product: Product, *, head_dim: int | None = None, device_kind: str = DEFAULT_DEVICE) -> Params | None:
    """Parameters from `tuned/`, or None where the kernel is not known to win.

    The file has, for `<size>x<segments>x<columns>`, parameters by the number of rows that they were measured at; they
    serve as many, and fewer down to more than half. For a projection that is fused with what it is for (`head_dim`),
    the name is `<size>x<segments>x<columns> in heads of <head_dim>`.
    """
    path = pathlib.Path(__file__).parent / "tuned" / f"{device_kind.lower().replace(' ', '_')}.json"
    if not path.exists() or product.rows % ROWS:
        return None
    key = f"{product.size}x{product.segments}x{product.columns}"
    key += "" if head_dim is None else f" in heads of {head_dim}"
    tuned = json.loads(path.read_text()).get(key, {})
    fitting = [int(rows) for rows in tuned if product.rows <= int(rows) < 2 * product.rows]
    return Params(**tuned[str(min(fitting))]) if fitting else None


def default_params(product: Product) -> Params:
    """Parameters for a product that nobody has tuned: about one CTA an SM, half of its memory.

    Raises:
      NotImplementedError: none fit.
    """

    def distance(candidate: Params) -> float:
        return abs(math.log(product.columns / candidate.block_n * candidate.splits / 132))

    candidates = []
    for block_n, splits in itertools.product((2 * ATOM, ATOM), SPLITS):
        stage = ATOM * (product.segments * block_n + product.rows) * 2
        params = Params(block_n=block_n, splits=splits, num_stages=max(2, 96 * 1024 // stage))
        with contextlib.suppress(NotImplementedError):
            params.check(product)
            candidates.append(params)
    if not candidates:
        raise NotImplementedError(f"{product} cannot be cut into tiles of {ATOM} columns and {ATOM} rows")
    return min(candidates, key=distance)
