"""The gated feed-forward network (SwiGLU, arXiv 2002.05202)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax.numpy as jnp
from flax import nnx

from jaxinfer.kernels.all_reduce import Channel
from jaxinfer.kernels.linear import choose_prefetch
from jaxinfer.kernels.prefetch import Prefetch
from jaxinfer.layers.linear import multiply, multiply_into, param
from jaxinfer.layers.stream import NOTHING, ONE_DEVICE, Following, Stream, Sums

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
        following: Following = NOTHING,
        channel: Channel | None = None,
    ) -> Stream:
        """Reads the norm of the stream and adds to the stream; see `multiply_into`."""
        x, missing = stream.normalise(norm)
        down = choose_prefetch(self.implementation, x.shape[0], self.down[...])
        options = {"activation": "silu", "prefetch": down, "implementation": self.implementation}
        hidden = multiply(x, self.gate_up, norm=missing, **options)
        options = {"implementation": self.implementation, "sums": self.sums}
        return multiply_into(stream, hidden, self.down, following=following, channel=channel, **options)

    def prefetch(self, num_rows: int) -> Prefetch | None:
        """What may be asked for by the kernel before."""
        return choose_prefetch(self.implementation, num_rows, self.gate_up[...], activation="silu")
