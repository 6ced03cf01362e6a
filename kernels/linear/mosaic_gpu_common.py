"""What the Hopper kernels of `linear` share: layouts, the norm before a product and what comes behind it."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.linear.tuning import ATOM, ROWS

TILE_ROWS = 8  # rows of a swizzled tile
WARPS, LANES = 4, 32
UNROLL = 8


def swizzled_smem(shape: tuple[int, ...], dtype: Any, *, atom: int = ATOM) -> pl.MemoryRef:
    """Shared memory in the layout of wgmma operands, in tiles of `atom` columns."""
    tiling = plgpu.TilingTransform((TILE_ROWS, atom))  # pyright: ignore[reportAbstractUsage]
    swizzle = plgpu.SwizzleTransform(2 * atom)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))


def _tiled(tiling: tuple, warp_dims: tuple, lane_dims: tuple) -> Any:
    layout = fragments.TiledLayout(
        fragments.Tiling(tiling), warp_dims=warp_dims, lane_dims=lane_dims, vector_dim=-1, _check_canonical=False
    ).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


@functools.cache
def x_layout() -> Any:
    """Rows of x [16 i, 64 j] in registers: a thread holds 8 neighbours, a quarter of a warp 64 of a row."""
    return _tiled(((ROWS, ATOM), (4, ATOM), (8,)), (-5,), (-3, -2))


def single_registers() -> Any:
    """An accumulator's layout without pairs of neighbours, so that it can be stored transposed."""
    layout = fragments.WGMMA_LAYOUT_ACC_32BIT
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


@functools.cache
def out_layout(rows: int, columns: int, *, whole_rows: bool = False) -> Any:
    """The output [rows, columns] in registers: a warp holds neighbours of a row, the warps rows and then columns.

    With `whole_rows` a row is one warp's, and warps without a row of their own hold that of another.
    """
    warp_rows = math.gcd(WARPS, rows)
    warp_columns = WARPS // warp_rows
    fitting = [v for v in (4, 2, 1) if columns % (LANES * v * warp_columns) == 0]
    copies = 1
    if not fitting or whole_rows:
        fitting, copies, warp_columns = [v for v in (4, 2, 1) if columns % (LANES * v) == 0], warp_columns, 1
    width = LANES * fitting[0]
    tiling = ((warp_rows, warp_columns * width), (1, width), (fitting[0],))
    warp_dims = (*([fragments.Replicated(copies)] if copies > 1 else []), -5, -4)
    return _tiled(tiling, warp_dims, (-2,))


def repeat(count: int, body: Callable[[Any, Any], Any], carry: Any = None) -> Any:
    """`lax.fori_loop`, written out where it is short."""
    if count > UNROLL:
        return lax.fori_loop(0, count, body, carry)
    for i in range(count):
        carry = body(i, carry)
    return carry


@dataclasses.dataclass(frozen=True)
class Fusions:
    """What stands around the product."""

    eps: float | None
    has_bias: bool
    has_residual: bool
    activation: str | None

    def split(self, refs: list[Any]) -> tuple[Any, Any, Any]:
        """(norm weight, bias, residual) of the arrays that are there, None for the others."""
        refs = list(refs)
        flags = (self.eps is not None, self.has_bias, self.has_residual)
        norm, bias, residual = (refs.pop(0) if flag else None for flag in flags)
        return norm, bias, residual


def spread(values: jax.Array, shape: tuple[int, ...], axis: int, layout: Any) -> jax.Array:
    """`values` along `axis` of an array in `layout`."""
    return plgpu.layout_cast(lax.broadcast_in_dim(values, shape, (axis,)), layout)


def row_scales(x_ref: Any, eps: float) -> jax.Array:
    """1 / rms of every row of x [T, K] in device memory, in the rows of `x_layout`."""
    rows, size = x_ref.shape
    unroll = max(1, 16 * ROWS // rows)  # 16 byte loads in flight a thread

    def add_squares(i, total):
        parts = []
        for j in range(unroll):
            columns = pl.ds((i * unroll + j) * ATOM, ATOM)
            parts.append(plgpu.load(x_ref.at[:, columns], layout=x_layout(), optimized=False))
        for part in parts:
            wide = part.astype(jnp.float32)
            total = total + wide * wide
        return total

    unroll = math.gcd(unroll, size // ATOM)
    total = plgpu.layout_cast(jnp.zeros((rows, ATOM), jnp.float32), x_layout())
    total = lax.fori_loop(0, size // ATOM // unroll, add_squares, total)
    return lax.rsqrt(total.sum(axis=1) / size + eps)


def sum_of_squares(x_smem: Any) -> jax.Array:
    """Of every row of x [atoms, T, 64] in shared memory, in the rows of `x_layout`."""
    atoms, *shape = x_smem.shape

    def add_squares(i, total):
        wide = plgpu.load(x_smem.at[i], layout=x_layout()).astype(jnp.float32)
        return total + wide * wide

    zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), x_layout())
    return repeat(atoms, add_squares, zeros).sum(axis=1)


def normalise(tile: Any, norm_weight: Any, scales: jax.Array) -> None:
    """Replace a tile of x in shared memory [T, 64] by its norm, rounded as two operations would."""
    layout = x_layout()
    x = plgpu.load(tile, layout=layout).astype(jnp.float32) * spread(scales, tile.shape, 0, layout)
    weight = plgpu.load(norm_weight, layout=layout.reduce(0), optimized=False).astype(jnp.float32)
    x = x.astype(tile.dtype).astype(jnp.float32) * spread(weight, tile.shape, 1, layout)
    tile[...] = x.astype(tile.dtype)


def load_added(
    bias_ref: Any, residual_ref: Any, rows: Any, columns: Any, layout: Any
) -> tuple[list[jax.Array], jax.Array | None]:
    """What `finish` adds to some rows and columns, in the layout of their sums: every segment's bias, and the residual.

    Args:
      bias_ref: [segments, F] in device memory, or None.
      residual_ref: [T, F] in device memory, or None.
      rows, columns: slices of T and F.
    """
    biases, residual = [], None
    if residual_ref is not None:
        residual = plgpu.load(residual_ref.at[rows, columns], layout=layout, optimized=False)
    if bias_ref is not None:
        for s in range(bias_ref.shape[0]):
            values = plgpu.load(bias_ref.at[s, columns], layout=layout.reduce(0), optimized=False)
            biases.append(spread(values.astype(jnp.float32), (rows.size, columns.size), 1, layout))
    return biases, residual


def finish(
    sums: list[jax.Array], biases: list[jax.Array], residual: jax.Array | None, fusions: Fusions, dtype: Any
) -> jax.Array:
    """What comes behind the product; float32 until the end."""
    if biases:
        sums = [a + b for a, b in zip(sums, biases, strict=True)]
    if fusions.activation == "silu":
        gate, up = sums
        out = gate / (1.0 + jnp.exp(-gate)) * up
    else:
        (out,) = sums
    if residual is not None:
        out = out + residual.astype(jnp.float32)
    return out.astype(dtype)
