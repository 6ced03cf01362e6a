"""`linear`: validates, then dispatches."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax

from jaxinfer.kernels.linear import reference

IMPLEMENTATIONS = ("mosaic_gpu", "reference")


@partial(jax.jit, static_argnames=("norm_eps", "activation", "implementation"))
def linear(
    x: jax.Array,
    weight: jax.Array,
    *,
    norm_weight: jax.Array | None = None,
    norm_eps: float = 1e-6,
    bias: jax.Array | None = None,
    activation: str | None = None,
    residual: jax.Array | None = None,
    implementation: str = "reference",
) -> jax.Array:
    """residual + activation(norm(x) @ weight + bias), accumulated in float32.

    Args:
      x: [T, *inputs].
      weight: [*inputs, *outputs].
      norm_weight: [inputs], of one dimension: x is RMS-normalised over it, rounded to its dtype, and multiplied.
      norm_eps: added to the mean square.
      bias: [*outputs].
      activation: None, or "silu": outputs are [2, F], and silu(out[0]) * out[1] is left.
      residual: [T, *outputs], or [T, F] with an activation.
      implementation: one of `IMPLEMENTATIONS`.

    Returns:
      [T, *outputs], or [T, F] with an activation, in x's dtype.

    Raises:
      ValueError: shapes that do not fit together, or an unknown activation.
      NotImplementedError: the implementation cannot do this case.
    """
    num_inputs = x.ndim - 1
    inputs, outputs = weight.shape[:num_inputs], weight.shape[num_inputs:]
    if x.shape[1:] != inputs or not outputs:
        raise ValueError(f"x {x.shape} does not fit weight {weight.shape}")
    if activation not in (None, "silu") or (activation and (len(outputs) != 2 or outputs[0] != 2)):
        raise ValueError(f"activation {activation!r} does not fit outputs {outputs}")
    result = (x.shape[0], *(outputs if activation is None else outputs[1:]))
    for name, array, shape in (
        ("norm_weight", norm_weight, inputs),
        ("bias", bias, outputs),
        ("residual", residual, result),
    ):
        if array is not None and array.shape != shape:
            raise ValueError(f"{name} {array.shape} should be {shape}")
    options: dict[str, Any] = {"norm_weight": norm_weight, "norm_eps": norm_eps, "activation": activation}
    if implementation == "reference":
        return reference.linear(x, weight, bias=bias, residual=residual, **options)
    if implementation != "mosaic_gpu":
        raise NotImplementedError(f"linear has no implementation {implementation!r}")
    from jaxinfer.kernels.linear import mosaic_gpu

    segments = 1 if activation is None else 2
    size, columns = math.prod(inputs), math.prod(outputs) // segments
    out = mosaic_gpu.linear(
        x.reshape(-1, size),
        weight.reshape(size, segments, columns),
        bias=None if bias is None else bias.reshape(segments, columns),
        residual=None if residual is None else residual.reshape(-1, columns),
        **options,
    )
    return out.reshape(result)
