"""A product of 64 to 256 rows, for Hopper: tiles large enough for the tensor cores, in one wave of CTAs.

W [K, segments, F]      block 0        block 1   ...      cluster = a block of columns, of every segment
                      +--------------+--------------+
segment 0, split 0    | CTA (0,0,0)  | CTA (1,0,0)  |     CTA: all rows of x and one block of columns, over its share
segment 0, split 1    | CTA (0,0,1)  | CTA (1,0,1)  |          of K, through a ring in shared memory
segment 1, split 0    | CTA (0,1,0)  | CTA (1,1,0)  |
   ...

producer   x, W -> ready[s] ...
consumers  y += x W                  each some rows of x, which are wgmma's M; weight columns are its N
exchange   y -> shared memory        over the ring; every CTA of the cluster then reads all partial sums of its share
                                     of the rows, adds up those of a segment in order of the splits, and writes

A row's result depends on no other row, and sums run in a fixed order. With 128 rows the bound is device memory, the
weight's bytes; with 256 the tensor cores.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.linear.mosaic_gpu_common import Fusions, finish, load_biases, out_layout, repeat, swizzled_smem
from jaxinfer.kernels.linear.tuning import PADDING, PRODUCER_REGISTERS, ManyRowsParams, Product


def _kernel(
    x_ref,  # [T, K]
    w_ref,  # [K, segments, F]
    *refs,  # bias [segments, F], residual [T, F] where there are any; then the outputs
    fusions: Fusions,
    params: ManyRowsParams,
):
    *optional, out_ref, part_ref = refs
    _, bias_ref, residual_ref = fusions.split(optional)
    num_rows, size = x_ref.shape
    segments, block_n, block_k, splits = w_ref.shape[1], params.block_n, params.block_k, params.splits
    num_tiles = size // splits // block_k
    stages = min(params.num_stages, num_tiles)
    consumers = num_rows // params.consumer_rows
    parts = segments * splits
    registers = params.consumer_registers(num_rows)
    block, part = lax.axis_index("column"), lax.axis_index("part")
    segment, split = lax.div(part, splits), lax.rem(part, splits)
    columns = pl.ds(block * block_n, block_n)
    in_shared = params.exchange == "shared"
    moves_registers = in_shared and consumers > 1  # a single consumer is launched with as many as it can use

    ring = (
        swizzled_smem((stages, num_rows, block_k), x_ref.dtype, atom=params.atom),
        swizzled_smem((stages, block_k, block_n), w_ref.dtype, atom=params.atom),
    )
    part_smem = plgpu.SMEM((num_rows, block_n + PADDING), jnp.float32)

    @functools.partial(
        pl.run_scoped,
        memory=plgpu.RefUnion(ring, part_smem) if in_shared and parts > 1 else (ring, ()),
        ready=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        drained=plgpu.Barrier(num_arrivals=consumers),
        exchange=(
            plgpu.ClusterBarrier(collective_axes=("part",), num_arrivals=consumers, num_barriers=2) if parts > 1 else ()
        ),
        collective_axes="wg",
    )
    def _scope(memory, ready, free, drained, exchange):
        (x_smem, w_smem), part_smem = memory
        wg = lax.axis_index("wg")

        @pl.when(wg == consumers)
        def _producer():
            if moves_registers:
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

            def load(i, slot):
                depth = pl.ds((split * num_tiles + i) * block_k, block_k)
                plgpu.copy_gmem_to_smem(w_ref.at[depth, segment, columns], w_smem.at[slot], ready.at[slot])
                plgpu.copy_gmem_to_smem(x_ref.at[:, depth], x_smem.at[slot], ready.at[slot])

            def reload(i, _):
                slot = lax.rem(i, stages)
                plgpu.barrier_wait(free.at[slot])
                load(i, slot)

            repeat(stages, lambda i, _: load(i, i))
            lax.fori_loop(stages, num_tiles, reload, None)

        def at(other):
            """What another CTA of the cluster has left."""
            return plgpu.cluster_ref(part_smem, {"part": other}) if in_shared else part_ref.at[block, other]

        def write_rows(rows, sums, layout):
            biases = [] if bias_ref is None else load_biases(bias_ref.at[:, columns], layout, sums[0].shape[0])
            residual = None
            if residual_ref is not None:
                residual = plgpu.load(residual_ref.at[rows, columns], layout=layout, optimized=False)
            out_ref.at[rows, columns][...] = finish(sums, biases, residual, fusions, out_ref.dtype)

        @pl.when(wg < consumers)
        def _consumer():
            if moves_registers:
                plgpu.set_max_registers(registers, action="increase")
            my_rows = pl.ds(wg * params.consumer_rows, params.consumer_rows)

            def accumulate(accumulator):
                def step(i, _):
                    slot = lax.rem(i, stages)
                    plgpu.barrier_wait(ready.at[slot])
                    plgpu.wgmma(accumulator, x_smem.at[slot, my_rows], w_smem.at[slot])
                    plgpu.wgmma_wait(1)

                    @pl.when((i > 0) & (i - 1 + stages < num_tiles))
                    def _():
                        plgpu.barrier_arrive(free.at[lax.rem(i - 1, stages)])

                lax.fori_loop(0, num_tiles, step, None)
                return accumulator[...]

            product = pl.run_scoped(accumulate, plgpu.ACC((params.consumer_rows, block_n), jnp.float32))
            if parts == 1:
                write_rows(my_rows, [product], plgpu.Layout.WGMMA)
                return

            def meet(number):
                plgpu.barrier_arrive(exchange.at[number])
                plgpu.barrier_wait(exchange.at[number])

            # Nobody may read the ring any more when the sums are written over it.
            plgpu.barrier_arrive(drained)
            plgpu.barrier_wait(drained)
            mine = part_smem if in_shared else at(part)
            mine.at[my_rows, pl.ds(0, block_n)][...] = product
            meet(0)
            count = params.consumer_rows // parts
            rows = pl.ds((part * consumers + wg) * count, count)
            layout = out_layout(count, block_n)
            sums = []
            for s in range(segments):
                found = [
                    plgpu.load(at(s * splits + k).at[rows, pl.ds(0, block_n)], layout=layout, optimized=False)
                    for k in range(splits)
                ]
                sums.append(functools.reduce(lambda a, b: a + b, found))
            write_rows(rows, sums, layout)
            meet(1)  # no CTA may end while others read its shared memory


def run(operands: list[jax.Array], product: Product, fusions: Fusions, params: ManyRowsParams) -> jax.Array:
    """[T, F] of x [T, K], the weight [K, segments, F] and what `_kernel` names."""
    blocks = product.columns // params.block_n
    parts = (1,)
    if params.exchange == "device":
        parts = (blocks, product.segments * params.splits, product.rows, params.block_n)
    out, _ = plgpu.kernel(
        functools.partial(_kernel, fusions=fusions, params=params),
        out_type=(
            jax.ShapeDtypeStruct((product.rows, product.columns), operands[0].dtype),
            jax.ShapeDtypeStruct(parts, jnp.float32),
        ),
        grid=(blocks,),
        grid_names=("column",),
        cluster=(product.segments * params.splits,),
        cluster_names=("part",),
        num_threads=product.rows // params.consumer_rows + 1,
        thread_name="wg",
        kernel_name="linear_many_rows",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*operands)
    return out
