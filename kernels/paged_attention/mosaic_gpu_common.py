"""What the Hopper decode and prefill kernels share."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

NEG_INF = -1e30  # finite: -inf - -inf is NaN
LOG2E = math.log2(math.e)
TMA_ALIGNMENT = 128  # bytes of shared memory; elsewhere a copy ends the program, but not in the interpreter
TILE_ROWS = 8  # rows of one swizzle tile, which a TMA copy may not split


def leading_decode_rows(seq_lens: jax.Array, query_start_loc: jax.Array) -> jax.Array:
    """bool [S]: rows before the first that has not exactly one token; row s of these is token s."""
    return jnp.cumprod((jnp.diff(query_start_loc) == 1) & (seq_lens > 0)) == 1


def swizzled_smem(shape: tuple[int, ...], dtype: Any, *, like: int | None = None) -> pl.MemoryRef:
    """Shared memory in the layout of wgmma operands, the layout for rows of `like` elements if that is given.

    Both operands of a wgmma must have the same.
    """
    return plgpu.SMEM(shape, dtype, transforms=swizzle_transforms(like or shape[-1], dtype))


def swizzle_transforms(columns: int, dtype: Any) -> tuple[Any, ...]:
    """What `swizzled_smem` does to rows of so many elements."""
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = plgpu.find_swizzle(columns * itemsize * 8)
    return plgpu.TilingTransform((TILE_ROWS, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle)  # pyright: ignore[reportAbstractUsage]


def _copy_width(columns: int, itemsize: int) -> int:
    """Columns that a quarter or half of a warp, with 8 elements a thread, copies of a row."""
    width = plgpu.find_swizzle(columns * itemsize * 8) // itemsize
    return 128 if width == 64 and columns % 128 == 0 else width


def copy_rows(columns: int, itemsize: int) -> int:
    """Rows, at least 16, that a warpgroup with `copy_layout` copies in few registers."""
    return max(16, 1024 // _copy_width(columns, itemsize))


@functools.cache
def copy_layout(columns: int, itemsize: int, *, rows: int = 64) -> Any:
    """Registers of [rows i, columns] on their way into `swizzled_smem` of elements of this many bytes.

    A thread holds 8 neighbours of a row and 8 threads a row of a swizzle tile: neither reading rows that lie one after
    the other nor writing swizzled ones has two threads at a bank. With fewer rows than that takes (see `copy_rows`) a
    thread holds as many as there are.
    """
    width = _copy_width(columns, itemsize)
    vector = min(8, rows * width // 128)
    warp_rows = 32 * vector // width
    layout = fragments.TiledLayout(
        fragments.Tiling(((4 * warp_rows, width), (warp_rows, width), (vector,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
        _check_canonical=False,
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def zero_rows_outside(ref: Any, low: jax.Array | int, high: jax.Array | int) -> None:
    """Zero the rows of a swizzled [rows, columns] tile in shared memory that are not in [low, high).

    Works on squares of 64, since the whole tile would not fit beside an accumulator in registers.
    """
    rows, columns = ref.shape
    for row in range(0, rows, 64):
        for column in range(0, columns, 64):
            width = min(64, columns - column)
            index = plgpu.broadcasted_iota(jnp.int32, (64, width), 0, layout=plgpu.Layout.WGMMA) + row
            part = ref.at[pl.ds(row, 64), pl.ds(column, width)]
            value = plgpu.load(part, layout=plgpu.Layout.WGMMA)
            part[...] = jnp.where((index < high) & (index >= low), value, jnp.zeros_like(value))


def pad_rows(x: jax.Array, *, multiple: int, minimum: int = 0) -> jax.Array:
    """`x` with zero rows added up to `minimum` and to a multiple of `multiple`: what TMA tiles ask for."""
    rows = max(-(-x.shape[0] // multiple) * multiple, minimum)
    return x if rows == x.shape[0] else jnp.pad(x, ((0, rows - x.shape[0]), *((0, 0),) * (x.ndim - 1)))


def copy_rows_out(smem: Any, out_ref: Any, token: jax.Array, head: jax.Array, low: jax.Array, count: jax.Array) -> None:
    """Rows [low, low + count) of smem[rows, D] to out_ref[token + row, head], awaited as TMA copies are.

    One bulk copy a row, by a thread each. A TMA copy has a fixed size, and begins at a multiple of TMA_ALIGNMENT, which
    a row of 80, 96 or 112 values need not.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 2 + (plgpu.Layout.WG_SPLAT(()),) * 4)
    def copy(_, smem, out, *scalars):
        i32, i64 = (ir.IntegerType.get_signless(n) for n in (32, 64))
        token, head, low, count = (x.registers.item() for x in scalars)
        out_type = ir.MemRefType(out.type)
        (_, num_heads, head_dim), size = out_type.shape, mgpu_utils.bytewidth(out_type.element_type)
        row = arith.remui(mgpu_utils.thread_idx(), mgpu_utils.c(mgpu_utils.WARPGROUP_SIZE, i32))
        is_row = arith.cmpi(arith.CmpIPredicate.ult, arith.subi(row, low), count)
        source = llvm.ptrtoint(i32, mgpu_utils.memref_ptr(smem))
        source = arith.addi(source, arith.muli(row, mgpu_utils.c(head_dim * size, i32)))
        place = arith.addi(arith.muli(arith.addi(token, row), mgpu_utils.c(num_heads, i32)), head)
        target = llvm.ptrtoint(i64, mgpu_utils.memref_ptr(out))
        target = arith.addi(target, arith.muli(arith.extui(i64, place), mgpu_utils.c(head_dim * size, i64)))
        mgpu_utils.inline_ptx(
            f"cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], {head_dim * size};",
            target,
            source,
            predicate=is_row,
            has_side_effects=True,
        )
        mgpu_utils.inline_ptx("cp.async.bulk.commit_group;", has_side_effects=True)

    copy(smem, out_ref, token, head, low, count)


def signal_counter(counter_ref: Any) -> None:
    """Add 1 to a counter in device memory, after everything this warpgroup has written."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def arrive(_, counter):
        mgpu_utils.warpgroup_barrier()
        mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(counter)).signal(1, memory_scope="gpu")

    arrive(counter_ref)  # pyright: ignore[reportCallIssue]


def await_counter(counter_ref: Any, value: jax.Array) -> None:
    """Wait until a counter in device memory is `value`, and set it back to 0."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def wait(_, counter, value):
        semaphore = mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(counter))
        semaphore.wait(value.registers.item(), memory_scope="gpu")

    wait(counter_ref, value)  # pyright: ignore[reportCallIssue]
