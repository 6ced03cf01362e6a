"""Products of a few rows with a weight for Hopper: the weight is read once, in one launch.

A cluster of `splits` CTAs computes `block_n` columns of the output, each over its own share of K:

    W [K, N]     block 0     block 1    ...           cluster = block of columns
               +-----------+-----------+
    split 0    | CTA (0,0) | CTA (1,0) |              CTA: tiles of [block_k, block_n] through a ring in shared memory
    split 1    | CTA (0,1) | CTA (1,1) |
               +-----------+-----------+

    producer   W, x -> ready[s] ...                   all weight tiles that fit are on their way before x is known
    consumer   x = norm(x) in place | y' += W' x'     weight columns are wgmma's M, rows of x its N (' is a transpose)
    exchange   y' -> shared memory of the CTA         every CTA of the cluster then adds up all partial sums, in order
                                                      of the splits, for its share of the rows, and writes them

`overlap` launches the kernel while the one before it still runs (programmatic dependent launch): weight tiles are
fetched meanwhile, everything else waits until that kernel has ended.

A row's result depends on no other row, and sums run in a fixed order. The bound is device memory: the weight's bytes.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.linear.tuning import ATOM, ROWS, Params, Product, default_params, tuned_params

TILE_ROWS = 8  # rows of a swizzled tile
WARPS, LANES = 4, 32


def swizzled_smem(shape: tuple[int, ...], dtype: Any) -> pl.MemoryRef:
    """Shared memory in the layout of wgmma operands."""
    tiling = plgpu.TilingTransform((TILE_ROWS, ATOM))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(128)))


def _tiled(tiling: tuple, warp_dims: tuple, lane_dims: tuple) -> Any:
    layout = fragments.TiledLayout(
        fragments.Tiling(tiling), warp_dims=warp_dims, lane_dims=lane_dims, vector_dim=-1, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


@functools.cache
def _x_layout() -> Any:
    """Rows of x [16 i, 64 j] in registers: a thread holds 8 neighbours, a quarter of a warp 64 of a row."""
    return _tiled(((ROWS, ATOM), (4, ATOM), (8,)), (-5,), (-3, -2))


def _single_registers() -> Any:
    """An accumulator's layout without pairs of neighbours, so that it can be stored transposed."""
    layout = fragments.WGMMA_LAYOUT_ACC_32BIT
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


@functools.cache
def _out_layout(rows: int, columns: int) -> Any:
    """The output [rows, columns] in registers: a warp holds neighbours of a row, the warps rows and then columns."""
    warp_rows = math.gcd(WARPS, rows)
    warp_columns = WARPS // warp_rows
    fitting = [v for v in (4, 2, 1) if columns % (LANES * v * warp_columns) == 0]
    copies = 1
    if not fitting:
        fitting, copies, warp_columns = [v for v in (4, 2, 1) if columns % (LANES * v) == 0], warp_columns, 1
    width = LANES * fitting[0]
    tiling = ((warp_rows, warp_columns * width), (1, width), (fitting[0],))
    warp_dims = (*([fragments.Replicated(copies)] if copies > 1 else []), -5, -4)
    return _tiled(tiling, warp_dims, (-2,))


@dataclasses.dataclass(frozen=True)
class _Fusions:
    """What stands around the product."""

    eps: float | None
    has_bias: bool
    has_residual: bool
    activation: str | None


def _spread(values: jax.Array, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """`values` along `axis` of an array in `layout`."""
    return plgpu.layout_cast(lax.broadcast_in_dim(values, shape, (axis,)), layout)


def _row_scales(x_ref: Any, eps: float) -> jax.Array:
    """1 / rms of every row of x [T, K] in device memory, in the rows of `_x_layout`."""
    rows, size = x_ref.shape
    unroll = max(1, 16 * ROWS // rows)  # 16 byte loads in flight a thread

    def add_squares(i, total):
        parts = []
        for j in range(unroll):
            columns = pl.ds((i * unroll + j) * ATOM, ATOM)
            parts.append(plgpu.load(x_ref.at[:, columns], layout=_x_layout(), optimized=False))
        for part in parts:
            wide = part.astype(jnp.float32)
            total = total + wide * wide
        return total

    unroll = math.gcd(unroll, size // ATOM)
    total = plgpu.layout_cast(jnp.zeros((rows, ATOM), jnp.float32), _x_layout())
    total = lax.fori_loop(0, size // ATOM // unroll, add_squares, total)
    return lax.rsqrt(total.sum(axis=1) / size + eps)


def _normalise(tile: Any, norm_weight: Any, scales: jax.Array) -> None:
    """Replace a tile of x in shared memory [T, 64] by its norm, rounded as two operations would."""
    layout = _x_layout()
    x = plgpu.load(tile, layout=layout).astype(jnp.float32) * _spread(scales, tile.shape, 0, layout)
    weight = plgpu.load(norm_weight, layout=layout.reduce(0), optimized=False).astype(jnp.float32)
    x = x.astype(tile.dtype).astype(jnp.float32) * _spread(weight, tile.shape, 1, layout)
    tile[...] = x.astype(tile.dtype)


def _kernel(
    x_ref,  # [T, K]
    w_ref,  # [K, segments, F]
    *refs,  # norm weight [K / 64, 64], bias [segments, F], residual [T, F] where there are any; then the outputs
    fusions: _Fusions,
    params: Params,
):
    *optional, out_ref, part_ref = refs
    norm_ref = optional.pop(0) if fusions.eps is not None else None
    bias_ref = optional.pop(0) if fusions.has_bias else None
    residual_ref = optional.pop(0) if fusions.has_residual else None
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

    def wait_for_previous_kernel():
        if params.overlap:
            plgpu.griddepcontrol_wait()

    @functools.partial(
        pl.run_scoped,
        w_smem=swizzled_smem((stages, segments, block_k, block_n), w_ref.dtype),
        x_smem=swizzled_smem((stages, atoms, num_rows, ATOM), x_ref.dtype),
        norm_smem=plgpu.SMEM((share // ATOM, ATOM), w_ref.dtype) if norm_ref is not None else (),
        part_smem=plgpu.SMEM((segments, num_rows, block_n), jnp.float32) if in_shared else (),
        ready=plgpu.Barrier(num_arrivals=segments + atoms, num_barriers=stages),
        free=plgpu.Barrier(num_barriers=stages),
        norm_ready=plgpu.Barrier(),
        exchange=plgpu.ClusterBarrier(collective_axes=("split",), num_barriers=2) if splits > 1 else (),
        collective_axes="wg",
    )
    def _scope(w_smem, x_smem, norm_smem, part_smem, ready, free, norm_ready, exchange):
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
                    plgpu.copy_gmem_to_smem(x_ref.at[:, columns], x_smem.at[slot, a], ready.at[slot])

            def load(i, _):
                slot = lax.rem(i, stages)
                plgpu.barrier_wait(free.at[slot])
                load_w(i, slot)
                load_x(i, slot)

            if norm_ref is not None:
                plgpu.copy_gmem_to_smem(norm_ref.at[pl.ds(split * share // ATOM, share // ATOM)], norm_smem, norm_ready)
            for i in range(stages):
                load_w(i, i)
            # The next kernel may take what room is left once all of this weight is on its way.
            if params.overlap and num_tiles == stages:
                plgpu.griddepcontrol_launch_dependents()
            wait_for_previous_kernel()
            for i in range(stages):
                load_x(i, i)
            lax.fori_loop(stages, num_tiles, load, None)
            if params.overlap and num_tiles > stages:
                plgpu.griddepcontrol_launch_dependents()

        @pl.when(wg == 0)
        def _consumer():
            wait_for_previous_kernel()
            layout = _out_layout(owned, block_n)
            shape = (owned, block_n)
            my_rows, my_columns = pl.ds(split * owned, owned), pl.ds(column, block_n)

            def fetch(ref):
                return plgpu.load(ref, layout=layout, optimized=False)

            residual = None if residual_ref is None else fetch(residual_ref.at[my_rows, my_columns])
            biases = []
            if bias_ref is not None:
                for s in range(segments):
                    values = plgpu.load(bias_ref.at[s, my_columns], layout=layout.reduce(0), optimized=False)
                    biases.append(_spread(values.astype(jnp.float32), shape, 1, layout))
            scales = None
            if norm_ref is not None:
                assert fusions.eps is not None
                scales = _row_scales(x_ref, fusions.eps)
                plgpu.barrier_wait(norm_ready)

            def multiply(*accumulators):
                def step(i, _):
                    slot = lax.rem(i, stages)
                    plgpu.barrier_wait(ready.at[slot])
                    if scales is not None:
                        for a in range(atoms):
                            _normalise(x_smem.at[slot, a], norm_smem.at[i * atoms + a], scales)
                        plgpu.commit_smem()
                    for s, accumulator in enumerate(accumulators):
                        for a in range(atoms):
                            w = w_smem.at[slot, s, pl.ds(a * ATOM, ATOM)]
                            plgpu.wgmma(accumulator, w.transpose((1, 0)), x_smem.at[slot, a].transpose((1, 0)))
                    plgpu.wgmma_wait(segments * atoms)

                    @pl.when((i > 0) & (i - 1 + stages < num_tiles))
                    def _():
                        plgpu.barrier_arrive(free.at[lax.rem(i - 1, stages)])

                lax.fori_loop(0, num_tiles, step, None)
                return tuple(accumulator[...] for accumulator in accumulators)

            products = pl.run_scoped(multiply, *[plgpu.ACC((block_n, num_rows), jnp.float32)] * segments)

            def part_of(other):
                if not in_shared:
                    return part_ref.at[lax.axis_index("column"), other]
                if splits == 1:
                    return part_smem
                return plgpu.cluster_ref(part_smem, {"split": other})

            for s, product in enumerate(products):
                mine = part_smem if in_shared else part_of(split)
                mine.at[s].transpose((1, 0))[...] = plgpu.layout_cast(product, _single_registers())
            if splits > 1:
                plgpu.barrier_arrive(exchange.at[0])
                plgpu.barrier_wait(exchange.at[0])
            else:
                plgpu.commit_smem()
            sums = []
            for s in range(segments):
                parts = [fetch(part_of(other).at[s, my_rows]) for other in range(splits)]
                sums.append(functools.reduce(lambda a, b: a + b, parts))
            sums = [a + b for a, b in zip(sums, biases, strict=True)] if biases else sums
            if fusions.activation == "silu":
                gate, up = sums
                out = gate / (1.0 + jnp.exp(-gate)) * up
            else:
                (out,) = sums
            if residual is not None:
                out = out + residual.astype(jnp.float32)
            out_ref.at[my_rows, my_columns][...] = out.astype(out_ref.dtype)
            if splits > 1:  # no CTA may end while others read its shared memory
                plgpu.barrier_arrive(exchange.at[1])
                plgpu.barrier_wait(exchange.at[1])


def linear(
    x: jax.Array,  # [T, K]
    weight: jax.Array,  # [K, segments, F]
    *,
    norm_weight: jax.Array | None = None,  # [K]
    norm_eps: float = 1e-6,
    residual: jax.Array | None = None,  # [T, F]
    bias: jax.Array | None = None,  # [segments, F]
    activation: str | None = None,
    params: Params | None = None,
) -> jax.Array:
    """See `api.linear`; [T, F]."""
    num_rows, size = x.shape
    _, segments, columns = weight.shape
    product = Product(num_rows, size, segments, columns)
    params = params or tuned_params(product) or default_params(product)
    params.check(product)
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weight.dtype != x.dtype:
        raise NotImplementedError(f"x {x.dtype} with weight {weight.dtype}: both must be bf16 or both f16")
    fusions = _Fusions(
        norm_eps if norm_weight is not None else None, bias is not None, residual is not None, activation
    )
    blocks = columns // params.block_n
    if norm_weight is not None:
        norm_weight = norm_weight.reshape(-1, ATOM)
    operands = [x, weight, *(y for y in (norm_weight, bias, residual) if y is not None)]
    part = (1,) if params.exchange == "shared" else (blocks, params.splits, segments, num_rows, params.block_n)
    kernel = plgpu.kernel(
        functools.partial(_kernel, fusions=fusions, params=params),
        out_type=(
            jax.ShapeDtypeStruct((num_rows, columns), x.dtype),
            jax.ShapeDtypeStruct(part, jnp.float32),
        ),
        grid=(blocks,),
        grid_names=("column",),
        cluster=(params.splits,),
        cluster_names=("split",),
        num_threads=2,
        thread_name="wg",
        kernel_name="linear",
        compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(*operands)[0]
