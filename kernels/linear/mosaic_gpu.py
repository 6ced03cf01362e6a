"""Products of up to 256 rows with a weight for Hopper: the weight is read once, in one launch.

The CTAs of a cluster share K and add up through each other's shared memory. In `mosaic_gpu_cluster`, for few rows,
weight columns are wgmma's M and rows of x its N. In `mosaic_gpu_many_rows`, for 64 or more, it is the other way round,
in larger tiles, and a norm before is a kernel of its own.

A row's result depends on no other row, and sums run in a fixed order. The bound is device memory, the weight's
bytes, and with 256 rows the tensor cores.
"""

import jax
import jax.numpy as jnp

from jaxinfer.kernels.linear import mosaic_gpu_cluster, mosaic_gpu_many_rows, reference
from jaxinfer.kernels.linear.mosaic_gpu_common import Fusions
from jaxinfer.kernels.linear.tuning import ATOM, ManyRowsParams, Params, Product, default_params, tuned_params
from jaxinfer.kernels.lowering import ask_ptxas_once

ask_ptxas_once()


def linear(
    x: jax.Array,  # [T, K]
    weight: jax.Array,  # [K, segments, F]
    *,
    norm_weight: jax.Array | None = None,  # [K]
    norm_eps: float = 1e-6,
    residual: jax.Array | None = None,  # [T, F]
    bias: jax.Array | None = None,  # [segments, F]
    activation: str | None = None,
    params: Params | ManyRowsParams | None = None,
) -> jax.Array:
    """See `api.linear`; [T, F]."""
    num_rows, size = x.shape
    _, segments, columns = weight.shape
    product = Product(num_rows, size, segments, columns, norm_weight is not None)
    params = params or tuned_params(product) or default_params(product)
    if norm_weight is not None and params.norm_apart:
        x, norm_weight = reference.rms_norm(x, norm_weight, norm_eps), None
    params.check(product)
    if x.dtype not in (jnp.bfloat16, jnp.float16) or weight.dtype != x.dtype:
        raise NotImplementedError(f"x {x.dtype} with weight {weight.dtype}: both must be bf16 or both f16")
    fusions = Fusions(norm_eps if norm_weight is not None else None, bias is not None, residual is not None, activation)
    if norm_weight is not None:
        norm_weight = norm_weight.reshape(-1, ATOM)
    operands = [x, weight, *(y for y in (norm_weight, bias, residual) if y is not None)]
    if isinstance(params, ManyRowsParams):
        return mosaic_gpu_many_rows.run(operands, product, fusions, params)
    return mosaic_gpu_cluster.run(operands, product, fusions, params)
