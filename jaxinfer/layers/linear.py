"""Matrix products and the fused projections around attention.

Fused weights keep kernels few and shard without a collective: query heads lie beside the KV head that they read.
Norms before and sums behind a product are handed to it, since a kernel may do them along with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.kernels.all_reduce import Channel
from jaxinfer.kernels.linear import choose_for, linear
from jaxinfer.layers.stream import ONE_DEVICE, Stream, Sums

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
    activation: str | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """residual + activation(norm(x) @ weight); see `kernels.linear`.

    Args:
      implementation: the fastest one that may be used; products that gain nothing by it use the reference.
    """
    value = weight[...]
    return linear(
        x,
        value,
        norm_weight=None if norm is None else norm.weight[...],
        norm_eps=1e-6 if norm is None else norm.eps,
        activation=activation,
        residual=residual,
        implementation=choose_for(implementation, x, value, activation=activation, has_norm=norm is not None),
    )


def multiply_into(
    stream: Stream,
    x: jax.Array,
    weight: nnx.Param,
    *,
    implementation: str,
    sums: Sums,
    next_norm: jax.Array | None,
    channel: Channel | None,
) -> Stream:
    """The stream and x @ weight, which is summed over the mesh axis of `sums`; see `Sums.add`."""
    if sums.axis_name is None:
        return Stream(multiply(x, weight, residual=stream.residual, implementation=implementation))
    part = multiply(x, weight, implementation=implementation)
    return sums.add(part, stream, next_norm, channel)


class QKVProjection(nnx.Module):
    """The weight of [T, hidden] -> [T, kv_heads, group + 2, head_dim]: a KV head's query heads, its K and its V.

    What follows the product is known to the layer: see `kernels.linear.qkv_rope_kv_update`.
    """

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


class AttentionOutput(nnx.Module):
    """[T, kv_heads, group, head_dim] -> [T, hidden], added to the residual stream."""

    def __init__(
        self,
        hidden: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        *,
        dtype: jnp.dtype,
        implementation: str = "reference",
        sums: Sums = ONE_DEVICE,
    ) -> None:
        axes = ("kv_heads", None, "head_dim", "embed")
        self.weight = param((kv_heads, group, head_dim, hidden), dtype, axes)
        self.implementation, self.sums = implementation, sums

    def __call__(
        self, x: jax.Array, stream: Stream, *, next_norm: jax.Array | None = None, channel: Channel | None = None
    ) -> Stream:
        """Adds to the stream; see `multiply_into`."""
        options = {"implementation": self.implementation, "sums": self.sums}
        return multiply_into(stream, x, self.weight, next_norm=next_norm, channel=channel, **options)
