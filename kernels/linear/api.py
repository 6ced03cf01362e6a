"""`linear` and `qkv_rope_kv_update`: validate, then dispatch."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.kernels.kv_update import check_rope, rope_kv_update
from jaxinfer.kernels.linear import reference
from jaxinfer.kernels.linear.tuning import Params, Product, tuned_params

IMPLEMENTATIONS = ("mosaic_gpu", "reference")


def choose(platform: str, *, compute_capability: str) -> str:
    """The fastest implementation that may be used; `choose_for` says for which products it is, by what is known of an
    H200, on other Hopper GPUs too.

    Args:
      platform: "cpu", "gpu" or "tpu".
      compute_capability: of the GPU, such as "9.0".
    """
    return "mosaic_gpu" if platform == "gpu" and compute_capability == "9.0" else "reference"


def choose_for(
    implementation: str,
    x: jax.Array,
    weight: jax.Array,
    *,
    activation: str | None = None,
    has_norm: bool = False,
    head_dim: int | None = None,
) -> str:
    """`implementation` if it is known to beat XLA at this product on an H200, else "reference".

    Args:
      has_norm: x is normalised along with it.
      head_dim: ask for the projection to heads of this size that is fused with their rotation and storing.
    """
    if implementation != "mosaic_gpu" or x.dtype not in (jnp.bfloat16, jnp.float16) or weight.dtype != x.dtype:
        return "reference"
    product = _product(x.shape, weight, activation, has_norm=has_norm)
    return "reference" if tuned_params(product, head_dim=head_dim) is None else implementation


def _product(x: tuple[int, ...], weight: jax.Array, activation: str | None, *, has_norm: bool) -> Product:
    """Of x in this shape."""
    segments = 1 if activation is None else 2
    size = math.prod(x[1:])
    return Product(x[0], size, segments, weight.size // size // segments, has_norm)


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

    product = _product(x.shape, weight, activation, has_norm=norm_weight is not None)
    size, segments, columns = product.size, product.segments, product.columns
    out = mosaic_gpu.linear(
        x.reshape(-1, size),
        weight.reshape(size, segments, columns),
        bias=None if bias is None else bias.reshape(segments, columns),
        residual=None if residual is None else residual.reshape(-1, columns),
        **options,
    )
    return out.reshape(result)


@partial(jax.jit, static_argnames=("eps", "implementation", "update_implementation"))
def qkv_rope_kv_update(
    x: jax.Array,
    weight: jax.Array,
    k_cache: jax.Array,
    v_cache: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    slot_mapping: jax.Array,
    *,
    norm_weight: jax.Array | None = None,
    eps: float = 1e-6,
    bias: jax.Array | None = None,
    q_norm: jax.Array | None = None,
    k_norm: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    v_scale: jax.Array | None = None,
    implementation: str = "reference",
    update_implementation: str = "reference",
    step_plan: Any = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`linear`, then `rope_kv_update`; in one launch where that is known to win.

    Args:
      x: [T, hidden].
      weight: [hidden, kv_heads, group + 2, head_dim].
      norm_weight: [hidden], of the norm before; None where x is normalised already.
      eps: of all norms.
      bias: [kv_heads, group + 2, head_dim].
      implementation: the fastest implementation of `linear` that may be used.
      update_implementation: of `rope_kv_update`, where it is a launch of its own.
      k_cache, v_cache, cos, sin, slot_mapping, q_norm, k_norm, k_scale, v_scale, step_plan: as for `rope_kv_update`.

    Returns:
      q [T, kv_heads * group, head_dim] in x's dtype, normalised and rotated, and both caches.

    Raises:
      ValueError: shapes that do not fit together.
      NotImplementedError: the implementation cannot do this case.
    """
    caches = (k_cache, v_cache, cos, sin, slot_mapping)
    norms = {"q_norm": q_norm, "k_norm": k_norm, "eps": eps}
    head_dim, has_norm = weight.shape[-1], norm_weight is not None
    is_plain = k_scale is None and v_scale is None and k_cache.dtype == x.dtype
    if is_plain and choose_for(implementation, x, weight, has_norm=has_norm, head_dim=head_dim) == "mosaic_gpu":
        from jaxinfer.kernels.linear import mosaic_gpu_qkv

        check_rope((x.shape[0], *weight.shape[1:]), *caches[:2], cos, sin, slot_mapping, q_norm, k_norm)
        params = tuned_params(_product(x.shape, weight, None, has_norm=has_norm), head_dim=head_dim)
        assert isinstance(params, Params)
        assert not params.norm_apart
        return mosaic_gpu_qkv.qkv_rope_kv_update(
            x, weight, *caches, norm_weight=norm_weight, bias=bias, **norms, params=params
        )
    qkv = linear(
        x,
        weight,
        norm_weight=norm_weight,
        norm_eps=eps,
        bias=bias,
        implementation=choose_for(implementation, x, weight, has_norm=has_norm),
    )
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    return rope_kv_update(qkv, *caches, **norms, **scales, implementation=update_implementation, step_plan=step_plan)
