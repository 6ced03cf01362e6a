"""A product of 64 to 256 rows, for Hopper: tiles large enough for the tensor cores, in one wave of CTAs.

W [K, segments, F]      block 0        block 1   ...      cluster = a block of columns, of every segment
                      +--------------+--------------+
segment 0, split 0    | CTA (0,0,0)  | CTA (1,0,0)  |     CTA: all rows of x and one block of columns, over its share
segment 0, split 1    | CTA (0,0,1)  | CTA (1,0,1)  |          of K, through a ring in shared memory
segment 1, split 0    | CTA (0,1,0)  | CTA (1,1,0)  |
   ...

producer   x, W -> ready[s] ...      x of gate and of up may be one: then each fetches half of a tile for both
consumers  y += x W                  each some rows of x, which are wgmma's M; weight columns are its N
exchange   y -> shared memory        over the ring; every CTA of the cluster then reads all partial sums of its share
                                     of the rows, adds up those of a segment in order of the splits, and writes

A row's result depends on no other row, and sums run in a fixed order. With 128 rows the bound is device memory, the
weight's bytes; with 256 the tensor cores.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.linear.mosaic_gpu_common import Fusions, finish, load_added, out_layout, repeat, swizzled_smem
from jaxinfer.kernels.linear.tuning import PADDING, PRODUCER_REGISTERS, ManyRowsParams, Product


@dataclasses.dataclass(frozen=True)
class Cut:
    """How a product is cut, and the place of this CTA in it.

    Args:
      shape: of the product.
      params: tuning.
    """

    shape: Product
    params: ManyRowsParams

    @property
    def parts(self) -> int:
        """CTAs of a cluster: each has a segment, and in it a share of K."""
        return self.shape.segments * self.params.splits

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply; one more loads."""
        return self.shape.rows // self.params.consumer_rows

    @property
    def num_tiles(self) -> int:
        return self.shape.size // self.params.splits // self.params.block_k

    @property
    def stages(self) -> int:
        return min(self.params.num_stages, self.num_tiles)

    @property
    def in_shared(self) -> bool:
        """Partial sums stay in shared memory."""
        return self.params.exchange == "shared"

    @property
    def moves_registers(self) -> bool:
        """From the producer to consumers. A single one is launched with what it uses; the interpreter has none."""
        return self.in_shared and self.consumers > 1

    @property
    def columns(self) -> Any:
        return pl.ds(lax.axis_index("column") * self.params.block_n, self.params.block_n)

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Shared memory and barriers. The interpreter takes any two accesses to a union for a conflict."""
        params, consumers = self.params, self.consumers
        x = swizzled_smem((self.stages, self.shape.rows, params.block_k), dtype, atom=params.atom)
        w = swizzled_smem((self.stages, params.block_k, params.block_n), dtype, atom=params.atom)
        sums = plgpu.SMEM((self.shape.rows, params.block_n + PADDING), jnp.float32)
        in_cluster = functools.partial(plgpu.ClusterBarrier, collective_axes=("part",), num_arrivals=consumers)
        free = in_cluster if params.shares_x else functools.partial(plgpu.Barrier, num_arrivals=consumers)
        return {
            "memory": plgpu.RefUnion((x, w), sums) if self.in_shared and self.parts > 1 else ((x, w), ()),
            "ready": plgpu.Barrier(num_arrivals=2, num_barriers=self.stages),
            "free": free(num_barriers=self.stages),
            "drained": plgpu.Barrier(num_arrivals=consumers),
            "exchange": in_cluster(num_barriers=2) if self.parts > 1 else (),
        }


def _kernel(
    x_ref,  # [T, K]
    w_ref,  # [K, segments, F]
    *refs,  # bias [segments, F], residual [T, F] where there are any; then the outputs
    fusions: Fusions,
    cut: Cut,
):
    *optional, out_ref, part_ref = refs
    _, bias_ref, residual_ref = fusions.split(optional)
    part = lax.axis_index("part")

    @functools.partial(pl.run_scoped, **cut.scratch(x_ref.dtype), collective_axes="wg")
    def _scope(memory, ready, free, drained, exchange):
        ring, part_smem = memory
        wg = lax.axis_index("wg")
        my_rows = pl.ds(wg * cut.params.consumer_rows, cut.params.consumer_rows)

        def exchange_sums(product):
            """Leave this CTA's sums to its cluster; write those of this consumer's share of the rows."""

            def at(other):
                if cut.in_shared:
                    return plgpu.cluster_ref(part_smem, {"part": other})
                return part_ref.at[lax.axis_index("column"), other]

            def meet(number):
                plgpu.barrier_arrive(exchange.at[number])
                plgpu.barrier_wait(exchange.at[number])

            # No other consumer may read the ring any more when sums are written over it.
            plgpu.barrier_arrive(drained)
            plgpu.barrier_wait(drained)
            block = pl.ds(0, cut.params.block_n)
            mine = part_smem if cut.in_shared else at(part)
            mine.at[my_rows, block][...] = product
            meet(0)
            count = cut.params.consumer_rows // cut.parts
            rows = pl.ds((part * cut.consumers + wg) * count, count)
            layout = out_layout(count, cut.params.block_n)
            loaded = [plgpu.load(at(i).at[rows, block], layout=layout, optimized=False) for i in range(cut.parts)]
            splits = cut.params.splits
            segments = [loaded[i : i + splits] for i in range(0, cut.parts, splits)]
            write_rows(rows, [functools.reduce(lambda a, b: a + b, sums) for sums in segments], layout)
            # No CTA may end while others read its memory. All threads have when one arrives: a store to device memory
            # ends with a barrier of the warpgroup.
            meet(1)

        def write_rows(rows, sums, layout):
            biases, residual = load_added(bias_ref, residual_ref, rows, cut.columns, layout)
            out_ref.at[rows, cut.columns][...] = finish(sums, biases, residual, fusions, out_ref.dtype)

        @pl.when(wg == cut.consumers)
        def _producer():
            if cut.moves_registers:
                plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            _load_tiles(x_ref, w_ref, part, ring, ready, free, cut)

        @pl.when(wg < cut.consumers)
        def _consumer():
            if cut.moves_registers:
                plgpu.set_max_registers(cut.params.consumer_registers(cut.shape.rows), action="increase")
            product = _multiply(my_rows, ring, ready, free, cut)
            if cut.parts == 1:
                write_rows(my_rows, [product], plgpu.Layout.WGMMA)
            else:
                exchange_sums(product)


def _load_tiles(x_ref: Any, w_ref: Any, part: jax.Array, ring: Any, ready: Any, free: Any, cut: Cut) -> None:
    """The producer: tiles of x and of the weight's segment, in order of K."""
    x_smem, w_smem = ring
    segment, split = lax.div(part, cut.params.splits), lax.rem(part, cut.params.splits)

    shared_by = "part" if cut.params.shares_x else None

    def load(i, slot):
        depth = pl.ds((split * cut.num_tiles + i) * cut.params.block_k, cut.params.block_k)
        plgpu.copy_gmem_to_smem(w_ref.at[depth, segment, cut.columns], w_smem.at[slot], ready.at[slot])
        plgpu.copy_gmem_to_smem(x_ref.at[:, depth], x_smem.at[slot], ready.at[slot], collective_axes=shared_by)

    def reload(i, _):
        slot = lax.rem(i, cut.stages)
        plgpu.barrier_wait(free.at[slot])
        load(i, slot)

    repeat(cut.stages, lambda i, _: load(i, i))
    lax.fori_loop(cut.stages, cut.num_tiles, reload, None)


def _multiply(my_rows: Any, ring: Any, ready: Any, free: Any, cut: Cut) -> jax.Array:
    """A consumer: its rows of x times the weight's block, float32 [rows, block_n]. One product is always under way."""
    x_smem, w_smem = ring

    def accumulate(accumulator):
        def step(i, _):
            slot = lax.rem(i, cut.stages)
            plgpu.barrier_wait(ready.at[slot])
            plgpu.wgmma(accumulator, x_smem.at[slot, my_rows], w_smem.at[slot])
            plgpu.wgmma_wait(1)

            @pl.when((i > 0) & (i - 1 + cut.stages < cut.num_tiles))
            def _():
                plgpu.barrier_arrive(free.at[lax.rem(i - 1, cut.stages)])

        lax.fori_loop(0, cut.num_tiles, step, None)
        return accumulator[...]

    return pl.run_scoped(accumulate, plgpu.ACC((cut.params.consumer_rows, cut.params.block_n), jnp.float32))  # pyright: ignore[reportPrivateImportUsage]


def run(operands: list[jax.Array], product: Product, fusions: Fusions, params: ManyRowsParams) -> jax.Array:
    """[T, F] of x [T, K], the weight [K, segments, F] and what `_kernel` names."""
    cut, blocks = Cut(product, params), product.columns // params.block_n
    in_device = (blocks, cut.parts, product.rows, params.block_n)
    out, _ = plgpu.kernel(
        functools.partial(_kernel, fusions=fusions, cut=cut),
        out_type=(
            jax.ShapeDtypeStruct((product.rows, product.columns), operands[0].dtype),
            jax.ShapeDtypeStruct((1,) if cut.in_shared else in_device, jnp.float32),
        ),
        grid=(blocks,),
        grid_names=("column",),
        cluster=(cut.parts,),
        cluster_names=("part",),
        num_threads=cut.consumers + 1,
        thread_name="wg",
        kernel_name="linear_many_rows",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*operands)
    return out
