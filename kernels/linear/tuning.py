"""Parameters of the Hopper kernels, and for which products and how many rows it is known to beat XLA's."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import math
import pathlib
from typing import Any, ClassVar

ATOM = 64  # columns of a swizzled tile, and wgmma's M
ROWS = 16  # rows of x come in multiples of this
MAX_SMEM = 224 * 1024
MAX_ROWS = 256
FEWEST_OF_MANY_ROWS = 128  # from here on products that are not tuned take the kernel for many rows
MAX_CLUSTER = 8
SMS = 132
MAX_ACCUMULATORS = 192  # registers of a thread that hold sums
REGISTERS = 512  # 65,536 of an SM over the 128 threads of a warpgroup
PRODUCER_REGISTERS = 40
OTHER_REGISTERS = 26  # that a consumer needs beside its sums, as ptxas says
PADDING = 8  # columns between rows of partial sums, so that a warp's stores of pairs hit all banks
SINGLES_PADDING = 4  # the same for stores of single columns, transposed
SPLITS = (1, 2, 4, 8)
DEFAULT_DEVICE = "NVIDIA H200"


@dataclasses.dataclass(frozen=True)
class Product:
    """What is multiplied: x [rows, size], or its norm, with a weight [size, segments, columns]; segments is 2 for a
    gated one."""

    rows: int
    size: int
    segments: int
    columns: int
    has_norm: bool = False

    @property
    def name(self) -> str:
        """In the files of `tuned/`, where there is an entry for each number of rows."""
        return f"{self.size}x{self.segments}x{self.columns}" + " of norm" * self.has_norm


@dataclasses.dataclass(frozen=True)
class Tuning:
    """How a product is cut.

    block_n: output columns of a CTA. splits: CTAs of a cluster that share K. block_k: rows of a weight tile, a multiple
    of 64. num_stages: tiles in flight a CTA.
    exchange: a cluster's partial sums go through "shared" memory, or "device" memory, which the interpreter can follow.
    """

    multiple_n: ClassVar[int] = ATOM

    block_n: int = 64
    splits: int = 4
    block_k: int = 64
    num_stages: int = 4
    exchange: str = dataclasses.field(default="shared", kw_only=True)

    def __post_init__(self) -> None:
        for name, multiple in (("block_n", self.multiple_n), ("block_k", ATOM)):
            value = getattr(self, name)
            if value % multiple or value <= 0:
                raise ValueError(f"{name} must be a multiple of {multiple}, got {value}")
        if self.splits not in SPLITS:
            raise ValueError(f"splits must be one of {SPLITS}, got {self.splits}")
        if self.num_stages < 2:
            raise ValueError(f"num_stages must be at least 2, got {self.num_stages}")
        if self.exchange not in ("shared", "device"):
            raise ValueError(f"exchange must be shared or device, got {self.exchange!r}")

    def smem_bytes(self, product: Product) -> int:
        """Shared memory of a CTA, barriers apart: the ring, and partial sums over it."""
        raise NotImplementedError

    def check(self, product: Product) -> None:
        """Raise NotImplementedError, with the values, for a product that these parameters cannot do."""
        if product.columns % self.block_n or product.size % (self.splits * self.block_k):
            raise NotImplementedError(f"{product} cannot be cut by {self}")
        needed = self.smem_bytes(product)
        if needed > MAX_SMEM:
            raise NotImplementedError(f"{product} needs {needed} bytes of shared memory with {self}")


@dataclasses.dataclass(frozen=True)
class Params(Tuning):
    """Of the kernel for few rows; a CTA has `block_n` columns of every segment.

    resident: the CTAs of a cluster keep their share of x in shared memory and work out its norm together.
    norm_apart: a norm before the product is a kernel of its own, not done by every CTA.
    """

    resident: bool = False
    norm_apart: bool = False

    def smem_bytes(self, product: Product) -> int:
        num_tiles, depth = product.size // self.splits // self.block_k, product.size // self.splits
        has_norm = product.has_norm and not self.norm_apart
        is_resident = self.resident and has_norm
        stage = self.block_k * (product.segments * self.block_n + product.rows * (not is_resident)) * 2
        x = depth * product.rows * 2 if is_resident else 0
        sums = product.segments * product.rows * (self.block_n + SINGLES_PADDING) * 4
        return max(min(self.num_stages, num_tiles) * stage + x, sums) + 2 * depth * has_norm

    def check(self, product: Product) -> None:
        if product.rows % ROWS or not 0 < product.rows <= MAX_ROWS:
            raise NotImplementedError(f"{product.rows} rows are no multiple of {ROWS} up to {MAX_ROWS}")
        if product.segments * self.block_n // ATOM * product.rows // 2 > MAX_ACCUMULATORS:
            raise NotImplementedError(f"{product} needs too many registers with {self}")
        super().check(product)


@dataclasses.dataclass(frozen=True)
class ManyRowsParams(Tuning):
    """Of the kernel for 64 to 256 rows; a CTA has `block_n` columns, up to 256, of one segment.

    consumer_rows: 64 or 128 rows of x a warpgroup.
    shares_x: the CTAs of gate and of up fetch half of each tile of x, for both. The interpreter does not know it.
    """

    multiple_n: ClassVar[int] = ATOM // 2
    norm_apart: ClassVar[bool] = True

    block_n: int = 128
    consumer_rows: int = 64
    shares_x: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_n > 256:
            raise ValueError(f"block_n must be at most 256, got {self.block_n}")
        if self.consumer_rows not in (64, 128):
            raise ValueError(f"consumer_rows must be 64 or 128, got {self.consumer_rows}")

    @classmethod
    def filling(
        cls, block_n: int, splits: int, consumer_rows: int, *, rows: int, shares_x: bool = False
    ) -> ManyRowsParams:
        """With as many tiles in flight as fit."""
        stages = MAX_SMEM // (cls.block_k * (block_n + rows) * 2)
        return cls(block_n, splits, num_stages=stages, consumer_rows=consumer_rows, shares_x=shares_x)

    @property
    def atom(self) -> int:
        """Columns of a swizzled tile."""
        return ATOM if self.block_n % ATOM == 0 else ATOM // 2

    def launched_registers(self, rows: int) -> int:
        """Registers that every thread is launched with, if a CTA takes all of an SM's."""
        return REGISTERS // (rows // self.consumer_rows + 1) // 8 * 8

    def consumer_registers(self, rows: int) -> int:
        """Registers that a consumer's thread may ask for: all that a CTA is launched with, but for the producer's."""
        consumers = rows // self.consumer_rows
        launched = self.launched_registers(rows) * (consumers + 1)
        return min((launched - PRODUCER_REGISTERS) // consumers // 8 * 8, 240)

    @property
    def accumulators(self) -> int:
        """Registers of a consumer's thread that hold sums."""
        return self.consumer_rows // ATOM * self.block_n // 2

    def smem_bytes(self, product: Product) -> int:
        stages = min(self.num_stages, product.size // self.splits // self.block_k)
        ring = stages * self.block_k * (product.rows + self.block_n) * 2
        return max(ring, product.rows * (self.block_n + PADDING) * 4 * (self.splits * product.segments > 1))

    def check(self, product: Product) -> None:
        if product.rows % self.consumer_rows or not 0 < product.rows <= MAX_ROWS:
            raise NotImplementedError(f"{product.rows} rows are no multiple of {self.consumer_rows} up to {MAX_ROWS}")
        if self.shares_x and (product.segments == 1 or self.splits > 1 or self.exchange == "device"):
            raise NotImplementedError(f"{product} has no CTAs that read the same x, with {self}")
        if self.splits * product.segments > MAX_CLUSTER:
            raise NotImplementedError(f"{product} needs clusters of more than {MAX_CLUSTER} CTAs with {self}")
        is_too_wide = self.block_n // 2 + OTHER_REGISTERS > self.launched_registers(product.rows)  # for one wgmma
        if is_too_wide or self.accumulators + OTHER_REGISTERS > self.consumer_registers(product.rows):
            raise NotImplementedError(f"{product} needs too many registers with {self}")
        super().check(product)


@functools.cache
def _tuned(device_kind: str) -> dict[str, dict[str, dict[str, Any]]]:
    path = pathlib.Path(__file__).parent / "tuned" / f"{device_kind.lower().replace(' ', '_')}.json"
    return json.loads(path.read_text()) if path.exists() else {}


@functools.cache
def tuned_params(
    product: Product, *, head_dim: int | None = None, device_kind: str = DEFAULT_DEVICE
) -> Params | ManyRowsParams | None:
    """Parameters from `tuned/`, or None where no kernel is known to win.

    The file has, for the product's name, parameters by the number of rows that they were measured at; they serve as
    many, and fewer down to more than half, in multiples that the kernel can do. Where there are none for the norm and
    the product, those for the product alone serve, with the norm apart. For a projection that is fused with what it is
    for (`head_dim`), ` in heads of <head_dim>` follows the name. Parameters with `consumer_rows` are for the kernel for
    many rows.
    """
    name = product.name + ("" if head_dim is None else f" in heads of {head_dim}")
    tuned = _tuned(device_kind).get(name, {})
    for rows, fields in sorted(tuned.items(), key=lambda item: int(item[0])):
        multiple = fields.get("consumer_rows", ROWS)
        if product.rows <= int(rows) < 2 * product.rows and product.rows % multiple == 0:
            return ManyRowsParams(**fields) if "consumer_rows" in fields else Params(**fields)
    if not product.has_norm or head_dim is not None:
        return None
    params = tuned_params(dataclasses.replace(product, has_norm=False), device_kind=device_kind)
    return dataclasses.replace(params, norm_apart=True) if isinstance(params, Params) else params


def wave(cluster: int) -> int:
    """CTAs that an H200 holds at once, one an SM, in clusters of so many: of 4 it holds 24 (measured) and not 32."""
    return SMS if cluster <= 2 else 104


def default_params(product: Product) -> Params | ManyRowsParams:
    """Parameters for a product that nobody has tuned: at most one CTA an SM, in small clusters; half of its memory if
    rows are few.

    Raises:
      NotImplementedError: none fit.
    """
    has_many_rows = product.rows >= FEWEST_OF_MANY_ROWS and product.rows % ATOM == 0
    candidates: list[tuple[float, int, Params | ManyRowsParams]] = []
    for block_n, splits in itertools.product((3 * ATOM, 2 * ATOM, ATOM), SPLITS):
        if has_many_rows:
            consumer_rows = ATOM if product.rows <= 3 * ATOM else 2 * ATOM
            params = ManyRowsParams.filling(block_n, splits, consumer_rows, rows=product.rows)
            parts = splits * product.segments
        else:
            stage = ATOM * (product.segments * block_n + product.rows) * 2
            params, parts = Params(block_n, splits, num_stages=max(2, 96 * 1024 // stage)), splits
        with contextlib.suppress(NotImplementedError):
            params.check(product)
            num_ctas, most = product.columns // block_n * parts, wave(parts) if has_many_rows else SMS
            candidates.append((abs(math.log(num_ctas / most)) + (num_ctas > most), splits, params))
    if not candidates:
        raise NotImplementedError(f"{product} cannot be cut into blocks of {ATOM} to {3 * ATOM} columns")
    return min(candidates, key=lambda candidate: candidate[:2])[-1]
