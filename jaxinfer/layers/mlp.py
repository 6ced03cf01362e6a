"""The gated feed-forward network (SwiGLU, arXiv 2002.05202)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.layers.linear import multiply, param

if TYPE_CHECKING:
    from jaxinfer.layers.norm import RMSNorm


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        *,
        dtype: jnp.dtype,
        implementation: str = "reference",
        axis_name: str | None = None,
    ) -> None:
        self.gate_up = param((hidden, 2, intermediate), dtype, ("embed", None, "mlp"))
        self.down = param((intermediate, hidden), dtype, ("mlp", "embed"))
        self.implementation, self.axis_name = implementation, axis_name

    def __call__(self, x: jax.Array, *, norm: RMSNorm | None = None, residual: jax.Array | None = None) -> jax.Array:
        """`norm` is applied to x before, `residual` added to the result, which is summed over the mesh axis first."""
        hidden = multiply(x, self.gate_up, norm=norm, activation="silu", implementation=self.implementation)
        return multiply(
            hidden, self.down, residual=residual, axis_name=self.axis_name, implementation=self.implementation
        )
