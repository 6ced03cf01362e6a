"""A product whose weight tiles are laid end to end and cut into equal shares, one a CTA, whatever the shape.

    tiles      | block 0: k 0 1 2 3 | block 1: k 0 1 2 3 | block 2: k 0 1 2 3 | ...     a block is block_n columns
    CTA        |------ 0 ------|------- 1 ------|------ 2 -------|---- 3 ...            a CTA runs its tiles backwards

Split as in stream-K (arXiv 2301.03598). The CTA with a block's last tile owns the block: it waits for the others'
partial sums, adds them up in the order of the CTAs and writes the output. The others ran that block first and the owner
runs it last, so the wait is short; owners wait only for CTAs of lower number, which were started before them, so they
cannot deadlock. Counters of finished partial sums are zero when a launch begins and when it ends.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mgpu_utils
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.linear.mosaic_gpu_common import (
    Fusions,
    finish,
    load_biases,
    normalise,
    out_layout,
    row_scales,
    single_registers,
    swizzled_smem,
)
from jaxinfer.kernels.linear.tuning import ATOM, Params, Product


def _arrive(counter_ref: Any) -> None:
    """Add 1 to a counter in device memory, after everything this warpgroup has written."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def arrive(_, counter):
        mgpu_utils.warpgroup_barrier()
        mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(counter)).signal(1, memory_scope="gpu")

    arrive(counter_ref)


def _await(counter_ref: Any, value: jax.Array) -> None:
    """Wait until a counter in device memory is `value`, and set it back to 0."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def wait(_, counter, value):
        semaphore = mgpu_utils.SemaphoreRef(mgpu_utils.memref_ptr(counter))
        semaphore.wait(value.registers.item(), memory_scope="gpu")

    wait(counter_ref, value)


def _kernel(
    x_ref,  # [T, K]
    w_ref,  # [K, segments, F]
    *refs,  # norm weight [K / 64, 64], bias [segments, F], residual [T, F] where there are any; counters; the outputs
    fusions: Fusions,
    params: Params,
):
    *optional, arrivals_ref, out_ref, part_ref = refs
    norm_ref, bias_ref, residual_ref = fusions.split(optional)
    num_rows, size = x_ref.shape
    _, segments, columns = w_ref.shape
    block_n, block_k = params.block_n, params.block_k
    atoms = block_k // ATOM
    depth = size // block_k  # tiles a block
    total = columns // block_n * depth
    share = pl.cdiv(total, params.num_ctas)
    stages = min(params.num_stages, share)
    cta = lax.axis_index("cta")
    start = cta * share
    end = jnp.minimum(start + share, total)
    count = end - start

    def wait_for_previous_kernel():
        if params.overlap:
            plgpu.griddepcontrol_wait()

    @functools.partial(
        pl.run_scoped,
        w_smem=swizzled_smem((stages, segments, block_k, block_n), w_ref.dtype),
        x_smem=swizzled_smem((stages, atoms, num_rows, ATOM), x_ref.dtype),
        norm_smem=plgpu.SMEM((size // ATOM, ATOM), w_ref.dtype) if norm_ref is not None else (),
        sum_smem=plgpu.SMEM((segments, num_rows, block_n), jnp.float32),
        ready=plgpu.Barrier(num_arrivals=segments + atoms, num_barriers=stages),
        free=plgpu.Barrier(num_barriers=stages),
        norm_ready=plgpu.Barrier(),
        collective_axes="wg",
    )
    def _scope(w_smem, x_smem, norm_smem, sum_smem, ready, free, norm_ready):
        wg = lax.axis_index("wg")

        @pl.when(wg == 1)
        def _producer():
            def load_w(t):
                tile = end - 1 - t
                rows = pl.ds(lax.rem(tile, depth) * block_k, block_k)
                column = lax.div(tile, depth) * block_n
                slot = lax.rem(t, stages)
                for s in range(segments):
                    source = w_ref.at[rows, s, pl.ds(column, block_n)]
                    plgpu.copy_gmem_to_smem(source, w_smem.at[slot, s], ready.at[slot])

            def load_x(t):
                row = lax.rem(end - 1 - t, depth) * block_k
                slot = lax.rem(t, stages)
                for a in range(atoms):
                    source = x_ref.at[:, pl.ds(row + a * ATOM, ATOM)]
                    plgpu.copy_gmem_to_smem(source, x_smem.at[slot, a], ready.at[slot])

            def load(t, _):
                plgpu.barrier_wait(free.at[lax.rem(t, stages)])
                load_w(t)
                load_x(t)

            if norm_ref is not None:
                plgpu.copy_gmem_to_smem(norm_ref, norm_smem, norm_ready)
            first = jnp.minimum(count, stages)
            lax.fori_loop(0, first, lambda t, _: load_w(t), None)
            wait_for_previous_kernel()
            lax.fori_loop(0, first, lambda t, _: load_x(t), None)
            lax.fori_loop(first, count, load, None)
            if params.overlap:
                plgpu.griddepcontrol_launch_dependents()

        @pl.when(wg == 0)
        def _consumer():
            wait_for_previous_kernel()
            scales = None
            if norm_ref is not None:
                assert fusions.eps is not None
                scales = row_scales(x_ref, fusions.eps)
                plgpu.barrier_wait(norm_ready)

            def release(t):
                @pl.when(t + stages < count)
                def _():
                    plgpu.barrier_arrive(free.at[lax.rem(t, stages)])

            def multiply(*accumulators, t, length):
                def step(i, _):
                    slot = lax.rem(t + i, stages)
                    plgpu.barrier_wait(ready.at[slot])
                    if scales is not None:
                        k = lax.rem(end - 1 - t - i, depth)
                        for a in range(atoms):
                            normalise(x_smem.at[slot, a], norm_smem.at[k * atoms + a], scales)
                        plgpu.commit_smem()
                    for s, accumulator in enumerate(accumulators):
                        for a in range(atoms):
                            w = w_smem.at[slot, s, pl.ds(a * ATOM, ATOM)]
                            plgpu.wgmma(accumulator, w.transpose((1, 0)), x_smem.at[slot, a].transpose((1, 0)))
                    plgpu.wgmma_wait(segments * atoms)

                    @pl.when(i > 0)
                    def _():
                        release(t + i - 1)

                lax.fori_loop(0, length, step, None)
                return tuple(accumulator[...] for accumulator in accumulators)

            def add_part(other, sums):
                parts = (
                    plgpu.load(part_ref.at[other, s], layout=plgpu.Layout.WGMMA, optimized=False)
                    for s in range(segments)
                )
                return tuple(a + b for a, b in zip(sums, parts, strict=True))

            def write(sums, block):
                layout = out_layout(num_rows, block_n)
                my_columns = pl.ds(block * block_n, block_n)
                residual = None
                if residual_ref is not None:
                    residual = plgpu.load(residual_ref.at[:, my_columns], layout=layout, optimized=False)
                biases = [] if bias_ref is None else load_biases(bias_ref.at[:, my_columns], num_rows)
                for s, value in enumerate(sums):
                    sum_smem.at[s].transpose((1, 0))[...] = plgpu.layout_cast(value, single_registers())
                values = [plgpu.load(sum_smem.at[s], layout=layout, optimized=False) for s in range(segments)]
                out_ref.at[:, my_columns][...] = finish(values, biases, residual, fusions, out_ref.dtype)

            def run_block(t):
                """The CTA's tiles of the block that its step t is in."""
                last = end - 1 - t
                block = lax.div(last, depth)
                first = jnp.maximum(block * depth, start)
                length = last - first + 1
                accumulators = [plgpu.ACC((block_n, num_rows), jnp.float32)] * segments
                sums = pl.run_scoped(functools.partial(multiply, t=t, length=length), *accumulators)
                release(t + length - 1)
                is_owner = lax.rem(last + 1, depth) == 0

                @pl.when(jnp.logical_not(is_owner))
                def _hand_over():
                    for s, value in enumerate(sums):
                        part_ref.at[cta, s][...] = value
                    owner = lax.div((block + 1) * depth - 1, share)
                    _arrive(arrivals_ref.at[pl.ds(owner, 1)])

                @pl.when(is_owner)
                def _finish():
                    others = cta - lax.div(block * depth, share)

                    @pl.when(others > 0)
                    def _():
                        _await(arrivals_ref.at[pl.ds(cta, 1)], others)

                    write(lax.fori_loop(cta - others, cta, add_part, sums), block)

                return t + length

            lax.while_loop(lambda t: t < count, run_block, jnp.int32(0))


def run(operands: list[jax.Array], product: Product, fusions: Fusions, params: Params) -> jax.Array:
    """[T, F] of x [T, K], the weight [K, segments, F] and what `_kernel` names."""
    kernel = plgpu.kernel(
        functools.partial(_kernel, fusions=fusions, params=params),
        out_type=(
            jax.ShapeDtypeStruct((product.rows, product.columns), operands[0].dtype),
            jax.ShapeDtypeStruct((params.num_ctas, product.segments, params.block_n, product.rows), jnp.float32),
        ),
        grid=(params.num_ctas,),
        grid_names=("cta",),
        num_threads=2,
        thread_name="wg",
        kernel_name="linear_shares",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(*operands, jnp.zeros((params.num_ctas,), jnp.int32))[0]
