"""The gated feed-forward network (SwiGLU, arXiv 2002.05202)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.layers.linear import einsum, param
from jaxinfer.sharding.collectives import all_reduce


class GatedMLP(nnx.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, hidden: int, intermediate: int, *, dtype: jnp.dtype) -> None:
        self.gate_up = param((hidden, 2, intermediate), dtype, ("embed", None, "mlp"))
        self.down = param((intermediate, hidden), dtype, ("mlp", "embed"))

    def __call__(self, x: jax.Array, axis_name: str | None = None) -> jax.Array:
        both = einsum("te,egm->tgm", x, self.gate_up[...])
        return all_reduce(einsum("tm,me->te", jax.nn.silu(both[:, 0]) * both[:, 1], self.down[...]), axis_name)
