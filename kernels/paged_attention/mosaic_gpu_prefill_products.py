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
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from jaxinfer.kernels.paged_attention.mosaic_gpu_common import NEG_INF, swizzle_transforms
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_wgmma import (
    ACCUMULATOR,
    ROWS,
    accumulator_of,
    asm,
    product,
    registers_of,
)

WGMMA = plgpu.Layout.WGMMA


@dataclasses.dataclass(frozen=True)
class Products:
    """Of an item and a consumer, whose queries are q_smem[ROWS, D].

    Scores and probabilities are [ROWS, keys], keys and values in shared memory [keys, D], O [ROWS, D]. pin_smem[128] is
    float32.
    """

    q_smem: Any
    pin_smem: Any
    q_in_registers: bool

    @property
    def _tile(self) -> plgpu.RefType:
        return plgpu.RefType(swizzle_transforms(self.q_smem.shape[-1], self.q_smem.dtype))

    @property
    def _output(self) -> plgpu.ShapeDtypeStruct:
        return plgpu.ShapeDtypeStruct(self.q_smem.shape, jnp.float32, layout=ACCUMULATOR)

    def queries(self) -> Any:
        """Q as the operand of all steps: in registers, or where it is."""
        if not self.q_in_registers:
            return self.q_smem

        @_inline((self._tile,), plgpu.ShapeDtypeStruct(self.q_smem.shape, self.q_smem.dtype, layout=WGMMA))
        def load(_, q):
            swizzle = 2 * ir.MemRefType(q.type).shape[3]
            q = fragments.FragmentedArray.load_tiled(q, swizzle, layout=fragments.WGMMA_LAYOUT)
            return fragments.optimization_barrier(q)

        return load(self.q_smem)

    def zeros(self) -> jax.Array:
        """O before the first step."""

        @_inline((), self._output)
        def make(_):
            zero = mgpu_utils.c(0.0, ir.F32Type.get())
            return fragments.FragmentedArray.splat(zero, self.q_smem.shape, ACCUMULATOR.to_mgpu())

        return make()

    def issue(self, p: jax.Array, o: jax.Array, q: Any, k_smem: Any, v_smem: Any) -> tuple[jax.Array, jax.Array]:
        """(Q K', O + P V), neither of which may be looked at before it has been awaited. q: from `queries`."""
        scores = plgpu.ShapeDtypeStruct(p.shape, jnp.float32, layout=ACCUMULATOR)
        q_type = WGMMA if self.q_in_registers else self._tile

        @_inline((WGMMA, ACCUMULATOR, q_type, self._tile, self._tile), (scores, self._output))
        def both(_, p, o, q, k, v):
            p, o = fragments.optimization_barrier(p, o)
            asm("wgmma.fence.sync.aligned;")
            scores = product([], q, mgpu.memref_transpose(k, (1, 0, 3, 2)))
            asm("wgmma.commit_group.sync.aligned;")
            output = product(registers_of(o), p, v)
            asm("wgmma.commit_group.sync.aligned;")
            return accumulator_of(scores, p.shape[1]), accumulator_of(output, o.shape[1])

        return both(p, o, q, k_smem, v_smem)

    def await_scores(self, s: jax.Array) -> jax.Array:
        """The scores, while the later product goes on."""

        @_inline((ACCUMULATOR,), plgpu.ShapeDtypeStruct(s.shape, jnp.float32, layout=WGMMA))
        def wait(_, s):
            asm("wgmma.wait_group.sync.aligned 1;")
            return s.to_layout(fragments.WGMMA_LAYOUT)

        return wait(s)

    def await_output(self, o: jax.Array, alpha: jax.Array, sums: jax.Array) -> jax.Array:
        """alpha O once O is there, which is awaited after `sums` is known. alpha: [ROWS]. sums: of `column_sums`.

        The compiler moves arithmetic over a wait, but no store: a store of what comes last keeps the softmax in front
        of the wait.
        """

        @_inline((ACCUMULATOR, WGMMA.reduce(1), WGMMA, plgpu.RefType()), self._output)
        def wait(_, o, alpha, sums, pin):
            i32 = ir.IntegerType.get_signless(32)
            address = llvm.ptrtoint(i32, mgpu_utils.memref_ptr(pin))
            address = arith.addi(address, arith.muli(_thread(), mgpu_utils.c(4, i32)))
            first, second = sums.registers.flat
            value = vector.reduction(ir.F32Type.get(), vector.CombiningKind.ADD, arith.addf(first, second))
            asm("st.volatile.shared.f32 [$0], $1;", [address, value], "r,f")
            asm("wgmma.wait_group.sync.aligned 0;")
            return _times_rows_if_needed(o, alpha)

        return wait(o, alpha, sums, self.pin_smem)

    def last(self, p: jax.Array, o: jax.Array, v_smem: Any) -> jax.Array:
        """O + P V, after the last step."""

        @_inline((WGMMA, ACCUMULATOR, self._tile), plgpu.ShapeDtypeStruct(o.shape, jnp.float32, layout=WGMMA))
        def finish(_, p, o, v):
            p, o = fragments.optimization_barrier(p, o)
            asm("wgmma.fence.sync.aligned;")
            output = product(registers_of(o), p, v)
            asm("wgmma.commit_group.sync.aligned;")
            asm("wgmma.wait_group.sync.aligned 0;")
            return accumulator_of(output, o.shape[1]).to_layout(fragments.WGMMA_LAYOUT)

        return finish(p, o, v_smem)

    @staticmethod
    def column_sums(x: jax.Array) -> jax.Array:
        """Sums of every eighth column, [ROWS, 8]: those that a thread can add up alone."""

        @_inline((WGMMA,), plgpu.ShapeDtypeStruct((ROWS, 8), jnp.float32, layout=WGMMA))
        def add(_, x):
            return functools.reduce(operator.add, (x[:, i : i + 8] for i in range(0, x.shape[1], 8)))

        return add(x)

    @staticmethod
    def mask(s: jax.Array, distance: jax.Array, window: int | None) -> jax.Array:
        """Scores, NEG_INF where a query does not see a key. distance: from the first key to the first query.

        Columns are immediates here; as an array they would take 32 registers through the whole loop.
        """

        @_inline((WGMMA, plgpu.Layout.WG_SPLAT(())), plgpu.ShapeDtypeStruct(s.shape, jnp.float32, layout=WGMMA))
        def put(_, s, distance):
            return _mask(s, distance.registers.item(), window)

        return put(s, distance)


def _mask(s: Any, distance: ir.Value, window: int | None) -> Any:
    # A thread holds rows `row` and `row` + 8, and of each eight columns `column` and the next.
    c = functools.partial(mgpu_utils.c, ty=ir.IntegerType.get_signless(32))
    warp, lane = arith.divui(_thread(), c(32)), arith.remui(_thread(), c(32))
    row = arith.addi(arith.muli(warp, c(16)), arith.divui(lane, c(4)))
    column = arith.muli(arith.remui(lane, c(4)), c(2))
    first = arith.subi(arith.addi(distance, row), column)
    unseen, s = mgpu_utils.c(NEG_INF, ir.F32Type.get()), s.copy()

    def masked(value: ir.Value, distance: ir.Value, key: int) -> ir.Value:
        seen = arith.cmpi(arith.CmpIPredicate.sge, distance, c(key))
        if window is not None:
            seen = arith.andi(seen, arith.cmpi(arith.CmpIPredicate.slt, distance, c(key + window)))
        return arith.select(seen, value, unseen)

    for key in range(0, s.shape[1], 8):
        part = s[:, key : key + 8]
        for i, (at, pair) in enumerate(zip((first, arith.addi(first, c(8))), part.registers.flat, strict=True)):
            values = [masked(vector.extract(pair, [], [j]), at, key + j) for j in range(2)]
            part.registers.flat[i] = vector.from_elements(pair.type, values)
        s[:, key : key + 8] = part
    return s


def _times_rows(o: Any, alpha: Any) -> Any:
    return o * alpha.broadcast_in_dim(o.shape, (0,), o.layout)


def _times_rows_if_needed(o: Any, alpha: Any) -> Any:
    """The same, unless alpha is 1 in all rows of the warp."""
    i32 = ir.IntegerType.get_signless(32)
    text = """{
        .reg .pred p, q;
        setp.ne.f32 p, $1, 0f3F800000;
        setp.ne.or.f32 q, $2, 0f3F800000, p;
        vote.sync.any.pred p, q, 0xffffffff;
        selp.u32 $0, 1, 0, p;
    }"""
    any_row = asm(text, list(alpha.registers.flat), "=r,f,f", i32)
    old = list(o.registers.flat)
    scaled = scf.IfOp(
        arith.cmpi(arith.CmpIPredicate.ne, any_row, mgpu_utils.c(0, i32)), [x.type for x in old], has_else=True
    )
    assert scaled.else_block is not None
    for block, registers in ((scaled.then_block, None), (scaled.else_block, old)):
        with ir.InsertionPoint(block):
            scf.yield_(registers or list(_times_rows(o, alpha).registers.flat))
    new = o.registers.copy()
    new.flat[:] = list(scaled.results)
    return fragments.FragmentedArray(_registers=new, _layout=o.layout, _is_signed=None)


def _thread() -> ir.Value:
    """The thread's number in its warpgroup."""
    size = mgpu_utils.c(mgpu_utils.WARPGROUP_SIZE, ir.IntegerType.get_signless(32))
    return arith.remui(mgpu_utils.thread_idx(), size)


def _inline(arg_types: tuple, return_type: Any) -> Any:
    return plgpu.inline_mgpu(arg_types=arg_types, return_type=return_type)
