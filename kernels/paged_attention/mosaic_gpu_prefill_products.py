"""Both products of a step, issued together and awaited one by one: what the prefill kernel's consumers overlap.

    issue          S = Q K' | O += P V           two groups of wgmma, S's first
    await_scores   S is there, O is not: the softmax of S runs while the matrix units add P V to O
    await_output   O is there, and is scaled for the maximum that the softmax found

Pallas's `wgmma` fences an operand in registers where the product is issued, which is after the product before it: the
compiler then awaits that one first. Here one fence stands before both.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.mosaic.gpu import mma_utils
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from jaxinfer.kernels.paged_attention.mosaic_gpu_common import TILE_ROWS, swizzle_transforms

ROWS = 64  # the M of a wgmma
DEPTH = 16  # its K
ACCUMULATOR = plgpu.Layout._WGMMA_ACC_32BIT


def load_queries(q_smem: Any) -> jax.Array:
    """Q as operand in registers, for all steps."""

    @_inline(
        arg_types=(plgpu.RefType(swizzle_transforms(q_smem.shape[-1], q_smem.dtype)),),
        return_type=plgpu.ShapeDtypeStruct(q_smem.shape, q_smem.dtype, layout=plgpu.Layout.WGMMA),
    )
    def load(_, q):
        swizzle = 2 * ir.MemRefType(q.type).shape[3]
        q = fragments.FragmentedArray.load_tiled(q, swizzle, layout=fragments.WGMMA_LAYOUT)
        return fragments.optimization_barrier(q)

    return load(q_smem)


def issue(p: jax.Array, o: jax.Array, q: Any, k_smem: Any, v_smem: Any) -> tuple[jax.Array, jax.Array]:
    """(Q K', O + P V), neither of which may be looked at before it has been awaited.

    p: [ROWS, keys]. o: [ROWS, D] float32, as `zeros` made it. q: [ROWS, D], in shared memory or from `load_queries`.
    k_smem, v_smem: [keys, D].
    """
    (_, keys), (_, head_dim) = p.shape, o.shape
    tile = plgpu.RefType(swizzle_transforms(head_dim, p.dtype))
    in_registers = isinstance(q, jax.Array)

    @_inline(
        arg_types=(plgpu.Layout.WGMMA, ACCUMULATOR, plgpu.Layout.WGMMA if in_registers else tile, tile, tile),
        return_type=(
            plgpu.ShapeDtypeStruct((ROWS, keys), jnp.float32, layout=ACCUMULATOR),
            plgpu.ShapeDtypeStruct((ROWS, head_dim), jnp.float32, layout=ACCUMULATOR),
        ),
    )
    def products(_, p, o, q, k, v):
        p, o = fragments.optimization_barrier(p, o)
        _asm("wgmma.fence.sync.aligned;")
        scores = _product([], q, mgpu.memref_transpose(k, (1, 0, 3, 2)))
        _asm("wgmma.commit_group.sync.aligned;")
        output = _product(_registers(o), p, v)
        _asm("wgmma.commit_group.sync.aligned;")
        return _accumulator(scores, keys), _accumulator(output, head_dim)

    return products(p, o, q, k_smem, v_smem)


def issue_last(p: jax.Array, o: jax.Array, v_smem: Any) -> jax.Array:
    """O + P V, not awaited."""
    _, head_dim = o.shape

    @_inline(
        arg_types=(plgpu.Layout.WGMMA, ACCUMULATOR, plgpu.RefType(swizzle_transforms(head_dim, p.dtype))),
        return_type=plgpu.ShapeDtypeStruct(o.shape, jnp.float32, layout=ACCUMULATOR),
    )
    def product(_, p, o, v):
        p, o = fragments.optimization_barrier(p, o)
        _asm("wgmma.fence.sync.aligned;")
        output = _product(_registers(o), p, v)
        _asm("wgmma.commit_group.sync.aligned;")
        return _accumulator(output, head_dim)

    return product(p, o, v_smem)


def mask(s: jax.Array, distance: jax.Array, *, window: int | None, masked: float) -> jax.Array:
    """Scores [ROWS, keys] with `masked` where a query does not see a key.

    distance: from the first key to the first query. Columns are immediates here; as an array they take 32 registers.
    """

    @_inline(
        arg_types=(plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct(s.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def put(_, s, distance):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        c = functools.partial(mgpu_utils.c, ty=i32)
        thread = arith.remui(mgpu_utils.thread_idx(), c(mgpu_utils.WARPGROUP_SIZE))
        warp, lane = arith.divui(thread, c(32)), arith.remui(thread, c(32))
        row = arith.addi(arith.muli(warp, c(16)), arith.divui(lane, c(4)))
        column = arith.muli(arith.remui(lane, c(4)), c(2))
        first = arith.subi(arith.addi(distance.registers.item(), row), column)
        distances = (first, arith.addi(first, c(8)))
        low, s = mgpu_utils.c(masked, f32), s.copy()
        for start in range(0, s.shape[1], 8):
            part = s[:, start : start + 8]
            for i, (at, pair) in enumerate(zip(distances, part.registers.flat, strict=True)):
                values = []
                for j in range(2):
                    seen = arith.cmpi(arith.CmpIPredicate.sge, at, c(start + j))
                    if window is not None:
                        near = arith.cmpi(arith.CmpIPredicate.slt, at, c(start + j + window))
                        seen = arith.andi(seen, near)
                    values.append(arith.select(seen, vector.extract(pair, [], [j]), low))
                part.registers.flat[i] = vector.from_elements(pair.type, values)
            s[:, start : start + 8] = part
        return s

    return put(s, distance)


def zeros(head_dim: int) -> jax.Array:
    @_inline(return_type=plgpu.ShapeDtypeStruct((ROWS, head_dim), jnp.float32, layout=ACCUMULATOR))
    def make(_):
        zero = mgpu_utils.c(0.0, ir.F32Type.get())
        return fragments.FragmentedArray.splat(zero, (ROWS, head_dim), ACCUMULATOR.to_mgpu())

    return make()


def await_scores(s: jax.Array) -> jax.Array:
    """The scores, while the later product goes on."""

    @_inline(
        arg_types=(ACCUMULATOR,),
        return_type=plgpu.ShapeDtypeStruct(s.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def wait(_, s):
        _asm("wgmma.wait_group.sync.aligned 1;")
        return s.to_layout(fragments.WGMMA_LAYOUT)

    return wait(s)


def await_output(o: jax.Array, alpha: jax.Array, sums: jax.Array, pin_smem: Any, *, is_rare: bool) -> jax.Array:
    """alpha O, [ROWS, D], once O is there, which is awaited after `sums` is known.

    alpha: [ROWS]. sums: as `column_sums` made it. pin_smem: [128] float32. The compiler moves arithmetic over a wait,
    but no store: a store of what comes last keeps the softmax in front of the wait.
    """

    @_inline(
        arg_types=(ACCUMULATOR, plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA, plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct(o.shape, jnp.float32, layout=ACCUMULATOR),
    )
    def wait(_, o, alpha, sums, pin):
        i32 = ir.IntegerType.get_signless(32)
        lane = arith.remui(mgpu_utils.thread_idx(), mgpu_utils.c(128, i32))
        address = llvm.ptrtoint(i32, mgpu_utils.memref_ptr(pin))
        address = arith.addi(address, arith.muli(lane, mgpu_utils.c(4, i32)))
        first, second = sums.registers.flat
        value = vector.reduction(ir.F32Type.get(), vector.CombiningKind.ADD, arith.addf(first, second))
        _asm("st.volatile.shared.f32 [$0], $1;", [address, value], "r,f")
        _asm("wgmma.wait_group.sync.aligned 0;")
        return _times_rows_if_needed(o, alpha) if is_rare else _times_rows(o, alpha)

    return wait(o, alpha, sums, pin_smem)


def _times_rows(o: Any, alpha: Any) -> Any:
    return o * alpha.broadcast_in_dim(o.shape, (0,), o.layout)


def _times_rows_if_needed(o: Any, alpha: Any) -> Any:
    """The same, unless alpha is 1 in all rows of the warp."""
    i32 = ir.IntegerType.get_signless(32)
    rows = list(alpha.registers.flat)
    text = """{
        .reg .pred p, q;
        setp.ne.f32 p, $1, 0f3F800000;
        setp.ne.or.f32 q, $2, 0f3F800000, p;
        vote.sync.any.pred p, q, 0xffffffff;
        selp.u32 $0, 1, 0, p;
    }"""
    needed = arith.cmpi(arith.CmpIPredicate.ne, _asm(text, rows, "=r,f,f", i32), mgpu_utils.c(0, i32))
    scaled = scf.IfOp(needed, [x.type for x in o.registers.flat], has_else=True)
    with ir.InsertionPoint(scaled.then_block):
        scf.yield_(list(_times_rows(o, alpha).registers.flat))
    with ir.InsertionPoint(scaled.else_block):
        scf.yield_(list(o.registers.flat))
    new = o.registers.copy()
    new.flat[:] = list(scaled.results)
    return fragments.FragmentedArray(_registers=new, _layout=o.layout, _is_signed=None)


def column_sums(x: jax.Array) -> jax.Array:
    """Sums of every eighth column, [ROWS, 8]: those that a thread can add up alone."""

    @_inline(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((ROWS, 8), jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def add(_, x):
        return functools.reduce(operator.add, (x[:, i : i + 8] for i in range(0, x.shape[1], 8)))

    return add(x)


def read_output(o: jax.Array) -> jax.Array:
    """O in the layout that other arithmetic takes, after all products."""

    @_inline(
        arg_types=(ACCUMULATOR,),
        return_type=plgpu.ShapeDtypeStruct(o.shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def wait(_, o):
        _asm("wgmma.wait_group.sync.aligned 0;")
        return o.to_layout(fragments.WGMMA_LAYOUT)

    return wait(o)


def _inline(arg_types: tuple = (), return_type: Any = None) -> Any:
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)


def _asm(text: str, operands: Sequence[ir.Value] = (), constraints: str = "", result: Any = None) -> Any:
    void = ir.Type.parse("!llvm.void")
    return llvm.inline_asm(result or void, list(operands), text, constraints, asm_dialect=0, has_side_effects=True)


def _registers(accumulator: Any) -> list[ir.Value]:
    return [vector.extract(x, dynamic_position=[], static_position=[0]) for x in accumulator.registers.flat]


def _accumulator(registers: list[ir.Value], columns: int) -> Any:
    """A FragmentedArray of an accumulator's registers."""
    f32 = ir.F32Type.get()
    layout = ACCUMULATOR.to_mgpu()
    array = fragments.FragmentedArray.splat(mgpu_utils.c(0.0, f32), (ROWS, columns), layout)
    new = array.registers.copy()
    one = ir.VectorType.get((1,), f32)
    new.flat[:] = [vector.broadcast(one, x) for x in registers]
    return fragments.FragmentedArray(_registers=new, _layout=layout, _is_signed=None)


def _product(accumulator: list[ir.Value], a: Any, b: ir.Value) -> list[ir.Value]:
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
    result = _asm(text, [*accumulator, *a, b], ",".join(constraints), struct)
    return [llvm.extractvalue(f32, result, [i]) for i in range(count)]
