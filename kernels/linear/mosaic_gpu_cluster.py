"""A product whose output columns are dealt to clusters of CTAs, which share K: for weights that SMs hold at once.

W [K, F]     block 0     block 1    ...           cluster = block of columns
           +-----------+-----------+
split 0    | CTA (0,0) | CTA (1,0) |              CTA: tiles of [block_k, block_n] through a ring in shared memory
split 1    | CTA (0,1) | CTA (1,1) |
           +-----------+-----------+

producer   W, x -> ready[s] ...
consumer   x = norm(x) in place | y' += W' x'     weight columns are wgmma's M, rows of x its N (' is a transpose)
exchange   y' -> shared memory, over the ring     every CTA of the cluster then adds up all partial sums, in order
                                                  of the splits, for its share of the rows, and writes them
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.linear.mosaic_gpu_common import (
    Fusions,
    finish,
    load_added,
    normalise,
    out_layout,
    repeat,
    row_scales,
    single_registers,
    sum_of_squares,
    swizzled_smem,
    x_layout,
)
from jaxinfer.kernels.linear.tuning import ATOM, SINGLES_PADDING, Params, Product

type Read = Callable[[int, Any, Any], jax.Array]
type Finish = Callable[[Any, Any, Any], Callable[[Read], None]]


def multiply(
    x_ref: Any,  # [T, K]
    w_ref: Any,  # [K, segments, F]
    norm_ref: Any,  # [K / 64, 64] or None
    part_refs: Any,  # partial sums, of the product and of squares of x, where they go through device memory
    finish: Finish,
    *,
    eps: float | None,
    params: Params,
    scratch: Any = (),
) -> None:
    """The body of a kernel: norm(x) @ w, of which every CTA hands its rows and columns to `finish`.

    `finish(rows, column, scratch)` is called before the product is known, to fetch what it needs, and returns
    `write(read)`. There, `read(segment, columns, layout)` gives those columns of the CTA's block, summed, float32.
    """
    num_rows, size = x_ref.shape
    segments = w_ref.shape[1]
    block_n, block_k, splits = params.block_n, params.block_k, params.splits
    share = size // splits
    num_tiles = share // block_k
    stages = min(params.num_stages, num_tiles)
    atoms = block_k // ATOM
    owned = num_rows // splits
    column = lax.axis_index("column") * block_n
    split = lax.axis_index("split")
    in_shared = params.exchange == "shared"
    is_resident = params.resident and norm_ref is not None
    x_atoms = share // ATOM
    part_ref, square_ref = part_refs

    ring = (
        swizzled_smem((stages, segments, block_k, block_n), w_ref.dtype),
        swizzled_smem((x_atoms if is_resident else stages * atoms, num_rows, ATOM), x_ref.dtype),
    )
    part_smem = plgpu.SMEM((segments, num_rows, block_n + SINGLES_PADDING), jnp.float32)

    @functools.partial(
        pl.run_scoped,
        memory=plgpu.RefUnion(ring, part_smem) if in_shared else (ring, ()),
        norm_smem=plgpu.SMEM((share // ATOM, ATOM), w_ref.dtype) if norm_ref is not None else (),
        square_smem=plgpu.SMEM((num_rows,), jnp.float32) if is_resident and in_shared else (),
        scratch=scratch,
        ready=plgpu.Barrier(num_arrivals=segments + (0 if is_resident else atoms), num_barriers=stages),
        free=plgpu.Barrier(num_barriers=stages),
        x_ready=plgpu.Barrier(num_arrivals=x_atoms) if is_resident else (),
        norm_ready=plgpu.Barrier(),
        exchange=plgpu.ClusterBarrier(collective_axes=("split",), num_barriers=3) if splits > 1 else (),
        collective_axes="wg",
    )
    def _scope(memory, norm_smem, square_smem, scratch, ready, free, x_ready, norm_ready, exchange):
        (w_smem, x_smem), part_smem = memory
        wg = lax.axis_index("wg")

        @pl.when(wg == 1)
        def _producer():
            def load_w(i, slot):
                rows = pl.ds(split * share + i * block_k, block_k)
                for s in range(segments):
                    source = w_ref.at[rows, s, pl.ds(column, block_n)]
                    plgpu.copy_gmem_to_smem(source, w_smem.at[slot, s], ready.at[slot])

            def load_x(i, slot):
                for a in range(atoms):
                    columns = pl.ds(split * share + i * block_k + a * ATOM, ATOM)
                    plgpu.copy_gmem_to_smem(x_ref.at[:, columns], x_smem.at[slot * atoms + a], ready.at[slot])

            def load_resident(i, _):
                columns = pl.ds(split * share + i * ATOM, ATOM)
                plgpu.copy_gmem_to_smem(x_ref.at[:, columns], x_smem.at[i], x_ready)

            def load(i, _):
                slot = lax.rem(i, stages)
                plgpu.barrier_wait(free.at[slot])
                load_w(i, slot)
                if not is_resident:
                    load_x(i, slot)

            if norm_ref is not None:
                plgpu.copy_gmem_to_smem(norm_ref.at[pl.ds(split * share // ATOM, share // ATOM)], norm_smem, norm_ready)
            for i in range(stages):
                load_w(i, i)
            if is_resident:
                repeat(x_atoms, load_resident)
            else:
                for i in range(stages):
                    load_x(i, i)
            lax.fori_loop(stages, num_tiles, load, None)

        def at_split(shared, in_device, other):
            """What another CTA of the cluster has left."""
            if not in_shared:
                return in_device.at[lax.axis_index("column"), other]
            return shared if splits == 1 else plgpu.cluster_ref(shared, {"split": other})

        def meet(number):
            """Wait for the cluster; what its CTAs left for each other is then visible."""
            if splits > 1:
                plgpu.barrier_arrive(exchange.at[number])
                plgpu.barrier_wait(exchange.at[number])
            else:
                plgpu.commit_smem()

        def normalise_resident():
            """Replace this CTA's share of x by its norm; each CTA adds up the squares of its own share."""
            layout = x_layout().reduce(1)
            mine: Any = square_smem if in_shared else at_split(None, square_ref, split)
            plgpu.barrier_wait(x_ready)
            mine[...] = sum_of_squares(x_smem)
            meet(2)
            parts = [
                plgpu.load(at_split(square_smem, square_ref, other), layout=layout, optimized=False)
                for other in range(splits)
            ]
            scales = lax.rsqrt(functools.reduce(lambda a, b: a + b, parts) / size + eps)
            plgpu.barrier_wait(norm_ready)
            repeat(x_atoms, lambda i, _: normalise(x_smem.at[i], norm_smem.at[i], scales))
            plgpu.commit_smem()

        @pl.when(wg == 0)
        def _consumer():
            my_rows = pl.ds(split * owned, owned)
            write = finish(my_rows, column, scratch)
            scales = None
            if is_resident:
                normalise_resident()
            elif norm_ref is not None:
                assert eps is not None
                scales = row_scales(x_ref, eps)
                plgpu.barrier_wait(norm_ready)

            def accumulate(*accumulators):
                def step(i, _):
                    slot = lax.rem(i, stages)
                    plgpu.barrier_wait(ready.at[slot])
                    first_atom = (i if is_resident else slot) * atoms
                    if scales is not None:
                        for a in range(atoms):
                            normalise(x_smem.at[first_atom + a], norm_smem.at[i * atoms + a], scales)
                        plgpu.commit_smem()
                    for s, accumulator in enumerate(accumulators):
                        for a in range(atoms):
                            w = w_smem.at[slot, s, pl.ds(a * ATOM, ATOM)]
                            x = x_smem.at[first_atom + a]
                            plgpu.wgmma(accumulator, w.transpose((1, 0)), x.transpose((1, 0)))
                    plgpu.wgmma_wait(segments * atoms)

                    @pl.when((i > 0) & (i - 1 + stages < num_tiles))
                    def _():
                        plgpu.barrier_arrive(free.at[lax.rem(i - 1, stages)])

                lax.fori_loop(0, num_tiles, step, None)
                return tuple(accumulator[...] for accumulator in accumulators)

            products = pl.run_scoped(accumulate, *[plgpu.ACC((block_n, num_rows), jnp.float32)] * segments)  # pyright: ignore[reportPrivateImportUsage]

            def read(segment, columns, layout):
                parts = [
                    plgpu.load(
                        at_split(part_smem, part_ref, other).at[segment, my_rows, columns],
                        layout=layout,
                        optimized=False,
                    )
                    for other in range(splits)
                ]
                return functools.reduce(lambda a, b: a + b, parts)

            for s, product in enumerate(products):
                mine: Any = part_smem if in_shared else at_split(None, part_ref, split)
                mine.at[s, :, pl.ds(0, block_n)].transpose((1, 0))[...] = plgpu.layout_cast(product, single_registers())
            meet(0)
            write(read)
            if splits > 1:  # no CTA may end while others read its shared memory
                meet(1)


def kernel(body: Callable[..., None], name: str, product: Product, params: Params, out_type: Any) -> Any:
    """`body` on a cluster a block of columns. Its last two outputs are partial sums, of products and of squares."""
    blocks = product.columns // params.block_n
    parts, squares = (1,), (1,)
    if params.exchange == "device":
        parts = (blocks, params.splits, product.segments, product.rows, params.block_n)
        squares = (blocks, params.splits, product.rows)
    return plgpu.kernel(
        body,
        out_type=(out_type, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in (parts, squares))),
        grid=(blocks,),
        grid_names=("column",),
        cluster=(params.splits,),
        cluster_names=("split",),
        num_threads=2,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


def _kernel(
    x_ref,  # [T, K]
    w_ref,  # [K, segments, F]
    *refs,  # norm weight [K / 64, 64], bias [segments, F], residual [T, F] where there are any; then the outputs
    fusions: Fusions,
    params: Params,
):
    *optional, out_ref, part_ref, square_ref = refs
    norm_ref, bias_ref, residual_ref = fusions.split(optional)
    segments, block_n = w_ref.shape[1], params.block_n
    owned = x_ref.shape[0] // params.splits
    layout = out_layout(owned, block_n)

    def finish_block(rows, column, _):
        columns = pl.ds(column, block_n)
        biases, residual = load_added(bias_ref, residual_ref, rows, columns, layout)

        def write(read):
            sums = [read(s, pl.ds(0, block_n), layout) for s in range(segments)]
            out_ref.at[rows, columns][...] = finish(sums, biases, residual, fusions, out_ref.dtype)

        return write

    multiply(x_ref, w_ref, norm_ref, (part_ref, square_ref), finish_block, eps=fusions.eps, params=params)


def run(operands: list[jax.Array], product: Product, fusions: Fusions, params: Params) -> jax.Array:
    """[T, F] of x [T, K], the weight [K, segments, F] and what `_kernel` names."""
    out = jax.ShapeDtypeStruct((product.rows, product.columns), operands[0].dtype)
    body = functools.partial(_kernel, fusions=fusions, params=params)
    return kernel(body, "linear", product, params, out)(*operands)[0]
