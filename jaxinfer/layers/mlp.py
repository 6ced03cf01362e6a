"""The gated feed-forward network (SwiGLU, arXiv 2002.05202)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.kernels.all_reduce import Channel
from jaxinfer.layers.linear import multiply, multiply_into, param
from jaxinfer.layers.stream import ONE_DEVICE, Stream, Sums

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
        sums: Sums = ONE_DEVICE,
    ) -> None:
        self.gate_up = param((hidden, 2, intermediate), dtype, ("embed", None, "mlp"))
        self.down = param((intermediate, hidden), dtype, ("mlp", "embed"))
        self.implementation, self.sums = implementation, sums

    def __call__(
        self,
        stream: Stream,
        *,
        norm: RMSNorm,
        next_norm: jax.Array | None = None,
        channel: Channel | None = None,
    ) -> Stream:
        """Reads the norm of the stream and adds to the stream; see `multiply_into`."""
        x, missing = stream.normalise(norm)
        hidden = multiply(x, self.gate_up, norm=missing, activation="silu", implementation=self.implementation)
        options = {"implementation": self.implementation, "sums": self.sums}
        return multiply_into(stream, hidden, self.down, next_norm=next_norm, channel=channel, **options)
