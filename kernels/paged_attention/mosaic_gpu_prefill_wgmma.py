"""Products of wgmma in PTX: operands in registers or shared memory, nothing fenced, nothing awaited."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from jaxinfer.kernels.paged_attention.mosaic_gpu_common import TILE_ROWS

ROWS = 64  # the M of a wgmma
DEPTH = 16  # its K
ACCUMULATOR = plgpu.Layout._WGMMA_ACC_32BIT


def asm(text: str, operands: Sequence[ir.Value] = (), constraints: str = "", result: Any = None) -> Any:
    void = ir.Type.parse("!llvm.void")
    return llvm.inline_asm(result or void, list(operands), text, constraints, asm_dialect=0, has_side_effects=True)


def registers_of(accumulator: Any) -> list[ir.Value]:
    return [vector.extract(x, dynamic_position=[], static_position=[0]) for x in accumulator.registers.flat]


def accumulator_of(registers: list[ir.Value], columns: int) -> Any:
    """A FragmentedArray of an accumulator's registers."""
    f32 = ir.F32Type.get()
    layout = ACCUMULATOR.to_mgpu()
    array = fragments.FragmentedArray.splat(mgpu_utils.c(0.0, f32), (ROWS, columns), layout)
    new = array.registers.copy()
    one = ir.VectorType.get((1,), f32)
    new.flat[:] = [vector.broadcast(one, x) for x in registers]
    return fragments.FragmentedArray(_registers=new, _layout=layout, _is_signed=None)


def product(accumulator: list[ir.Value], a: Any, b: ir.Value) -> list[ir.Value]:
    """Registers of `accumulator` + A B, or of A B if it is empty. A: in registers or shared memory; b: [K, N] there."""
    (depth, columns), element = mma_utils.tiled_memref_shape(b)
    group = ir.MemRefType(b.type).shape[3]
    if group == TILE_ROWS:  # b is transposed
        group = ir.MemRefType(b.type).shape[2]
    b_at = _operand(b, (group, columns), group, is_b=True)
    a_at = None if isinstance(a, fragments.FragmentedArray) else _operand(a, (ROWS, group), group, is_b=False)
    registers = accumulator
    for k in range(0, depth, DEPTH):
        operands = [_packed(x) for x in a[:, k : k + DEPTH].registers.flat] if a_at is None else [a_at(k)]
        transposed = (b_at.is_transposed,) if a_at is None else (a_at.is_transposed, b_at.is_transposed)
        registers = _wgmma(registers, operands, b_at(k), columns, element, transposed)
    return registers


@dataclasses.dataclass(frozen=True)
class _Operand:
    """Descriptors of an operand in shared memory, from its k-th column (of A) or row (of B) on."""

    first: Any
    group: int  # columns or rows of a swizzle tile
    step_bytes: int  # to the next DEPTH of them
    group_bytes: int  # to the next tile
    is_transposed: bool

    def __call__(self, k: int) -> ir.Value:
        num_bytes = k // self.group * self.group_bytes + k % self.group // DEPTH * self.step_bytes
        offset = mgpu_utils.c(mma_utils.encode_addr(num_bytes), ir.IntegerType.get_signless(64))
        return llvm.add(self.first, offset, overflow_flags=llvm.IntegerOverflowFlags.none)


def _operand(ref: ir.Value, size: tuple[int, int], group: int, *, is_b: bool) -> _Operand:
    tile = (group, group) if is_b else (ROWS, group)
    (first, (_, steps)), (_, group_bytes), fastest = mma_utils.create_descriptor(
        ref, swizzle=2 * group, group_size=size, large_tile=tile, logical_k_major=is_b
    )
    return _Operand(first, group, steps[-1], group_bytes, fastest != mma_utils.Dim.K)


def _packed(pair: ir.Value) -> ir.Value:
    """Two values of 16 bits as one register."""
    return llvm.bitcast(ir.IntegerType.get_signless(32), pair)


def _wgmma(
    accumulator: list[ir.Value],  # ROWS * columns / 128 registers, or none for zeros
    a: list[ir.Value],  # registers, or one descriptor
    b: ir.Value,
    columns: int,
    element: ir.Type,
    transposed: tuple[bool, ...],
) -> list[ir.Value]:
    f32 = ir.F32Type.get()
    count = columns // 2
    places = iter(range(2 * count + len(a) + 1))
    outputs = ", ".join(f"${next(places)}" for _ in range(count))
    for _ in accumulator:
        next(places)
    a_text = ", ".join(f"${next(places)}" for _ in a)
    if len(a) > 1:
        a_text = "{" + a_text + "}"
    flags = ", ".join(str(int(x)) for x in transposed)
    text = (
        f"{{ .reg .pred p; setp.ne.b32 p, {int(bool(accumulator))}, 0; "
        f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{element}.{element} "
        f"{{{outputs}}}, {a_text}, ${next(places)}, p, 1, 1, {flags}; }}"
    )
    constraints = (
        ["=f"] * count + [str(i) for i in range(len(accumulator))] + ["r" if len(a) > 1 else "l"] * len(a) + ["l"]
    )
    struct = llvm.StructType.get_literal([f32] * count)
    result = asm(text, [*accumulator, *a, b], ",".join(constraints), struct)
    return [llvm.extractvalue(f32, result, [i]) for i in range(count)]
