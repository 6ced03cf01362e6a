"""Matrix products and the fused projections around attention.

Fused weights keep kernels few and shard without a collective: query heads lie beside the KV head that they read.
Norms before and sums behind a product are handed to it, since a kernel may do them along with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.kernels.linear import choose, linear
from jaxinfer.sharding.collectives import all_reduce

if TYPE_CHECKING:
    from jaxinfer.layers.norm import RMSNorm


def param(shape: tuple[int, ...], dtype: jnp.dtype, axes: tuple[str | None, ...]) -> nnx.Param:
    """A parameter with logical axis names, one a dimension. Made under `nnx.eval_shape` it takes no memory."""
    assert len(shape) == len(axes), f"{shape} needs one axis name a dimension, got {axes}"
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


def einsum(spec: str, x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """A product accumulated in float32. float32 operands are multiplied exactly (GPUs would use TF32)."""
    precision = "highest" if x.dtype == jnp.float32 else None
    out = jnp.einsum(spec, x, weight, precision=precision, preferred_element_type=jnp.float32)
    return out.astype(out_dtype or x.dtype)


def multiply(
    x: jax.Array,
    weight: nnx.Param,
    *,
    implementation: str,
    norm: RMSNorm | None = None,
    bias: nnx.Param | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    axis_name: str | None = None,
) -> jax.Array:
    """residual + activation(norm(x) @ weight + bias), summed over a mesh axis first; see `kernels.linear`.

    Args:
      implementation: the fastest one that may be used; products that gain nothing by it use the reference.
      axis_name: the mesh axis that the inputs are cut over; None where one device has all of them.
    """
    value = weight[...]
    out = linear(
        x,
        value,
        norm_weight=None if norm is None else norm.weight[...],
        norm_eps=1e-6 if norm is None else norm.eps,
        bias=None if bias is None else bias[...],
        activation=activation,
        residual=residual if axis_name is None else None,
        implementation=choose(implementation, x, value, activation=activation),
    )
    if axis_name is None:
        return out
    out = all_reduce(out, axis_name)
    return out if residual is None else residual + out


class QKVProjection(nnx.Module):
    """[T, hidden] -> [T, kv_heads, group + 2, head_dim]: a KV head's query heads, its K and its V."""

    def __init__(
        self,
        hidden: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        *,
        dtype: jnp.dtype,
        has_bias: bool = False,
        implementation: str = "reference",
    ) -> None:
        shape = (hidden, kv_heads, group + 2, head_dim)
        self.weight = param(shape, dtype, ("embed", "kv_heads", None, "head_dim"))
        self.bias = param(shape[1:], dtype, ("kv_heads", None, "head_dim")) if has_bias else None
        self.implementation = implementation

    def __call__(self, x: jax.Array, *, norm: RMSNorm | None = None) -> jax.Array:
        """`norm` is applied to x before."""
        return multiply(x, self.weight, norm=norm, bias=self.bias, implementation=self.implementation)


class AttentionOutput(nnx.Module):
    """[T, kv_heads, group, head_dim] -> [T, hidden]."""

    def __init__(
        self,
        hidden: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        *,
        dtype: jnp.dtype,
        implementation: str = "reference",
        axis_name: str | None = None,
    ) -> None:
        axes = ("kv_heads", None, "head_dim", "embed")
        self.weight = param((kv_heads, group, head_dim, hidden), dtype, axes)
        self.implementation, self.axis_name = implementation, axis_name

    def __call__(self, x: jax.Array, *, residual: jax.Array | None = None) -> jax.Array:
        """`residual` is added to the result, which is summed over the mesh axis first."""
        return multiply(x, self.weight, residual=residual, axis_name=self.axis_name, implementation=self.implementation)
