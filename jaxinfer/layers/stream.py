"""The residual stream between sublayers, and how a sublayer adds to it where its sum is spread over devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import jax

from jaxinfer.kernels.all_reduce import Channel, all_reduce_norm
from jaxinfer.sharding.collectives import all_reduce

if TYPE_CHECKING:
    from jaxinfer.layers.norm import RMSNorm


class Stream(NamedTuple):
    """What a sublayer reads: a norm of the residual stream."""

    residual: jax.Array  # [T, hidden]
    normed: jax.Array | None = None  # the norm that comes next, where what added last has done it already

    def normalise(self, norm: RMSNorm) -> tuple[jax.Array, RMSNorm | None]:
        """(rows, the norm that is still to be applied to them)."""
        return (self.residual, norm) if self.normed is None else (self.normed, None)


class Sums(NamedTuple):
    """How partial sums are put together; static."""

    axis_name: str | None = None  # the mesh axis that they are spread over
    implementation: str = "psum"  # of `kernels.all_reduce`; "psum" adds and normalises apart from the sum
    eps: float = 1e-6  # of the norms

    @property
    def has_norm(self) -> bool:
        """Whether a sum may be normalised along with it."""
        return self.axis_name is not None and self.implementation != "psum"

    def add(
        self, part: jax.Array, stream: Stream, next_norm: jax.Array | None, channel: Channel | None = None
    ) -> Stream:
        """The stream and the sum of all devices' parts.

        Args:
          part: [T, hidden], this device's; to be summed over `axis_name`.
          next_norm: [hidden], the weight of the norm that comes next; None where it is not to be done here.
          channel: of the all-reduce kernel; None, or one for fewer rows, leaves the sum to XLA.
        """
        assert self.axis_name is not None
        is_served = self.implementation != "mosaic_gpu" or (channel is not None and part.shape[0] <= channel.rows)
        if next_norm is None or not self.has_norm or not is_served:
            return Stream(stream.residual + all_reduce(part, self.axis_name))
        normed, residual = all_reduce_norm(
            part,
            stream.residual,
            next_norm,
            self.axis_name,
            eps=self.eps,
            channel=channel,
            implementation=self.implementation,
        )
        return Stream(residual, normed)


ONE_DEVICE = Sums()
"""Nothing is spread."""
