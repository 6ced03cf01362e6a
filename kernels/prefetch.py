"""What a small kernel of a decode step asks the L2 cache to fetch for the kernel behind it.

    device memory   | weight | idle ... | weight | idle ...        the sums between products, launches, ends of kernels
    with            | weight | next ... | rest   | next ...        leave the memory idle; the next weight does not wait

Asking takes neither registers nor shared memory; the kernel may end before the bytes have come, and no result depends
on them. Where a kernel's own loads could queue behind, it asks after a delay. A product that a cluster's CTAs share by
parts of K begins in each part, so the beginning of each is asked for.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

PIECE = 4096  # bytes that a thread asks for at once
THREADS = 128  # of a warpgroup


@dataclasses.dataclass(frozen=True)
class Beginnings:
    """Which bytes of a weight [K, ...]: `size` of each of the `parts` that K is cut into, from its beginning.

    delay: cycles to wait first where the kernel's own loads might else queue behind.
    """

    parts: int
    size: int
    delay: int = 0

    def ask(self, ref: Any, worker: jax.Array, num_workers: int, *, is_early: bool = False) -> None:
        """To be called by all threads of a warpgroup, in a kernel of which `num_workers` warpgroups call it.

        Args:
          ref: to the weight, in device memory.
          worker: int32, this warpgroup's number among them.
          is_early: others may not have asked for what they need themselves.
        """
        from jax.experimental.mosaic.gpu import utils as mgpu_utils  # here: where there is no Hopper nobody needs it
        from jax.experimental.pallas import mosaic_gpu as plgpu
        from jaxlib.mlir import ir
        from jaxlib.mlir.dialects import arith, llvm

        pieces = self.size // PIECE  # of a part
        part_bytes = math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize // self.parts
        total, stride = self.parts * pieces, THREADS * num_workers

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
        def emit(_, ref, worker):
            i32, i64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))

            def times(value, factor):
                return arith.muli(arith.extui(i64, value), mgpu_utils.c(factor, i64))

            if is_early and self.delay:
                _wait(self.delay)
            thread = arith.remui(mgpu_utils.thread_idx(), mgpu_utils.c(THREADS, i32))
            first = arith.muli(thread, mgpu_utils.c(num_workers, i32))  # neighbours are asked for together
            first = arith.addi(first, worker.registers.item())
            base = llvm.ptrtoint(i64, mgpu_utils.memref_ptr(ref))
            for i in range(math.ceil(total / stride)):
                number = arith.addi(first, mgpu_utils.c(i * stride, i32))
                part = arith.divui(number, mgpu_utils.c(pieces, i32))
                piece = arith.remui(number, mgpu_utils.c(pieces, i32))
                address = arith.addi(base, arith.addi(times(part, part_bytes), times(piece, PIECE)))
                mgpu_utils.inline_ptx(
                    f"cp.async.bulk.prefetch.L2.global [$0], {PIECE};",
                    address,
                    predicate=arith.cmpi(arith.CmpIPredicate.ult, number, mgpu_utils.c(total, i32)),
                    has_side_effects=True,
                )

        emit(ref, worker)  # pyright: ignore[reportCallIssue]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["beginnings"])
@dataclasses.dataclass(frozen=True)
class Prefetch:
    """A weight that the kernel behind reads, and what of it to ask for."""

    weight: jax.Array
    beginnings: Beginnings

    @classmethod
    def of(cls, weight: jax.Array, max_bytes: int, *, parts: int = 1, delay: int = 0) -> Prefetch | None:
        """At most so many bytes in all; None where that is nothing, or parts do not begin at a multiple of 16 bytes."""
        part_bytes = weight.size * weight.dtype.itemsize // parts
        if weight.size % parts or part_bytes % 16:
            return None
        size = min(part_bytes, max_bytes // parts) // PIECE * PIECE
        return cls(weight, Beginnings(parts, size, delay)) if size else None


def _wait(cycles: int) -> None:
    """Emits a loop that looks at the clock."""
    from jax.experimental.mosaic.gpu import utils as mgpu_utils
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, scf

    i64 = ir.IntegerType.get_signless(64)

    def clock() -> Any:
        return mgpu_utils.inline_ptx("mov.u64 $0, %clock64;", result_types=i64, has_side_effects=True)

    start = clock()
    loop = scf.WhileOp([], [])
    with ir.InsertionPoint(loop.before.blocks.append()):
        passed = arith.subi(clock(), start)
        scf.condition(arith.cmpi(arith.CmpIPredicate.ult, passed, mgpu_utils.c(cycles, i64)), [])
    with ir.InsertionPoint(loop.after.blocks.append()):
        scf.yield_([])
