"""Matrix products and the fused projections around attention.

Fused weights keep kernels few and shard without a collective: query heads lie beside the KV head that they read.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.sharding.collectives import all_reduce


def param(shape: tuple[int, ...], dtype: jnp.dtype, axes: tuple[str | None, ...]) -> nnx.Param:
    """A parameter with logical axis names, one a dimension. Made under `nnx.eval_shape` it takes no memory."""
    assert len(shape) == len(axes), f"{shape} needs one axis name a dimension, got {axes}"
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


def einsum(spec: str, x: jax.Array, weight: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
    """A product accumulated in float32. float32 operands are multiplied exactly (GPUs would use TF32)."""
    precision = "highest" if x.dtype == jnp.float32 else None
    out = jnp.einsum(spec, x, weight, precision=precision, preferred_element_type=jnp.float32)
    return out.astype(out_dtype or x.dtype)


class QKVProjection(nnx.Module):
    """[T, hidden] -> q [T, kv_heads, group, head_dim], k and v [T, kv_heads, head_dim]."""

    def __init__(
        self,
        hidden: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        *,
        dtype: jnp.dtype,
        has_bias: bool = False,
    ) -> None:
        shape = (hidden, kv_heads, group + 2, head_dim)
        self.weight = param(shape, dtype, ("embed", "kv_heads", None, "head_dim"))
        self.bias = param(shape[1:], dtype, ("kv_heads", None, "head_dim")) if has_bias else None

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        out = einsum("te,ekgd->tkgd", x, self.weight[...])
        if self.bias is not None:
            out = out + self.bias[...][None]
        return out[:, :, :-2], out[:, :, -2], out[:, :, -1]


class AttentionOutput(nnx.Module):
    """[T, kv_heads, group, head_dim] -> [T, hidden]."""

    def __init__(self, hidden: int, kv_heads: int, group: int, head_dim: int, *, dtype: jnp.dtype) -> None:
        axes = ("kv_heads", None, "head_dim", "embed")
        self.weight = param((kv_heads, group, head_dim, hidden), dtype, axes)

    def __call__(self, x: jax.Array, axis_name: str | None = None) -> jax.Array:
        return all_reduce(einsum("tkgd,kgde->te", x, self.weight[...]), axis_name)
