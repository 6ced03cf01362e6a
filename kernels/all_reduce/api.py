"""`all_reduce` and `all_reduce_norm`: validate, then dispatch."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.kernels.all_reduce import reference
from jaxinfer.kernels.all_reduce.channel import Channel

IMPLEMENTATIONS = ("mosaic_gpu", "psum", "reference")
MAX_BYTES = 2 << 20
"""Of a message for which the kernel is chosen: beyond it sending everything to everybody costs more than a ring."""


def choose(platform: str, *, compute_capability: str, dtype: jnp.dtype, rows: int, hidden: int, ranks: int) -> str:
    """The fastest implementation for messages of this kind.

    Args:
      platform: "cpu", "gpu" or "tpu".
      compute_capability: of the GPU, such as "9.0".
      rows: of the message; a program with more is better served by "psum".
      ranks: devices that share the sum.
    """
    if platform == "gpu" and compute_capability == "9.0" and 1 < ranks <= 8:
        from jaxinfer.kernels.all_reduce import mosaic_gpu

        try:
            mosaic_gpu.check_supported(rows, hidden, jnp.dtype(dtype), ranks)
        except NotImplementedError:
            return "psum"
        if rows * hidden * jnp.dtype(dtype).itemsize * (ranks - 1) <= MAX_BYTES:
            return "mosaic_gpu"
    return "psum"


@partial(jax.jit, static_argnames=("axis_name", "implementation"))
def all_reduce(
    x: jax.Array, axis_name: str, *, channel: Channel | None = None, implementation: str = "psum"
) -> jax.Array:
    """The sum of `x` over the ranks of a mesh axis, for use inside `shard_map(check_vma=False)`.

    With "mosaic_gpu" and "reference" all ranks get the same bits: parts are added in float32 in the order of the
    ranks, and the total is rounded once.

    Calls on one channel must come in the same order on all ranks. Calls that depend on each other by data, as those
    of a transformer's layers do, have one; others need `lax.optimization_barrier` between them. Programs that use one
    channel are dispatched by one thread at a time.

    A program with calls to "mosaic_gpu" must also hold a collective of XLA's, such as the `psum` after the embedding:
    only then do the devices wait for each other until all have loaded the program, and loading can block while a
    kernel elsewhere waits.

    Args:
      x: [T, hidden].
      channel: from `connect`, in the form that this device sees under `shard_map`; None for other implementations.
      implementation: one of `IMPLEMENTATIONS`.

    Raises:
      ValueError: no channel, or one that is too small.
      NotImplementedError: the implementation cannot do this case.
    """
    if implementation == "mosaic_gpu":
        from jaxinfer.kernels.all_reduce import mosaic_gpu

        return mosaic_gpu.all_reduce(x, _given(channel))
    if implementation == "psum":
        return jax.lax.psum(x, axis_name)
    if implementation == "reference":
        return reference.all_reduce(x, axis_name)
    raise NotImplementedError(f"all_reduce has no implementation {implementation!r}")


@partial(jax.jit, static_argnames=("axis_name", "eps", "implementation"))
def all_reduce_norm(
    x: jax.Array,
    residual: jax.Array,
    weight: jax.Array,
    axis_name: str,
    *,
    eps: float = 1e-6,
    channel: Channel | None = None,
    implementation: str = "psum",
) -> tuple[jax.Array, jax.Array]:
    """What ends a sublayer: the sum over the ranks, the residual added, and the norm before the next one.

    Args:
      x: [T, hidden], this rank's part.
      residual: [T, hidden], the same on all ranks; added to the sum in float32 and rounded once.
      weight: [hidden] of the RMS norm (arXiv 1910.07467), which rounds to residual's dtype before it scales.
      axis_name, channel, implementation: as for `all_reduce`.

    Returns:
      The normalised rows and the new residual, both [T, hidden].

    Raises:
      ValueError: shapes or dtypes that do not fit together.
      NotImplementedError: the implementation cannot do this case.
    """
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise ValueError(f"residual {residual.dtype}{residual.shape} does not match {x.dtype}{x.shape}")
    if weight.shape != x.shape[1:] or weight.dtype != x.dtype:
        raise ValueError(f"weight {weight.dtype}{weight.shape} does not match {x.dtype}{x.shape}")
    if implementation == "mosaic_gpu":
        from jaxinfer.kernels.all_reduce import mosaic_gpu

        return mosaic_gpu.all_reduce_norm(x, residual, weight, _given(channel), eps=eps)
    if implementation == "psum":
        total = jax.lax.psum(x, axis_name).astype(jnp.float32)
        return reference.add_norm(total, residual, weight, eps)
    if implementation == "reference":
        return reference.all_reduce_norm(x, residual, weight, axis_name, eps=eps)
    raise NotImplementedError(f"all_reduce_norm has no implementation {implementation!r}")


def _given(channel: Channel | None) -> Channel:
    if channel is None:
        raise ValueError("the mosaic_gpu all_reduce needs a channel: see connect")
    return channel
