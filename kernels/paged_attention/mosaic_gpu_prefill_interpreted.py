"""`Products` from what the GPU interpreter knows: no operand of wgmma in registers, nothing between issue and wait."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxinfer.kernels.paged_attention.mosaic_gpu_common import NEG_INF


@dataclasses.dataclass(frozen=True)
class InterpretedProducts:
    """See `mosaic_gpu_prefill_products.Products`. p_smem: [ROWS, keys], of probabilities on their way to a product."""

    q_smem: Any
    p_smem: Any

    def queries(self) -> Any:
        return self.q_smem

    def zeros(self) -> jax.Array:
        return jnp.zeros(self.q_smem.shape, jnp.float32)

    def issue(self, p: jax.Array, o: jax.Array, q: Any, k_smem: Any, v_smem: Any) -> tuple[jax.Array, jax.Array]:
        keys = k_smem.transpose((1, 0))
        return _product(q, keys, p.shape), self.last(p, o, v_smem)

    def await_scores(self, s: jax.Array) -> jax.Array:
        return s

    def await_output(self, o: jax.Array, alpha: jax.Array, sums: jax.Array) -> jax.Array:
        del sums
        return o * alpha[:, None]

    def last(self, p: jax.Array, o: jax.Array, v_smem: Any) -> jax.Array:
        self.p_smem[...] = p
        plgpu.commit_smem()
        return o + _product(self.p_smem, v_smem, o.shape)

    @staticmethod
    def column_sums(x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], -1, 8).sum(axis=1)

    @staticmethod
    def mask(s: jax.Array, distance: jax.Array, window: int | None) -> jax.Array:
        rows, columns = (jax.lax.broadcasted_iota(jnp.int32, s.shape, axis) for axis in range(2))
        distances = distance + rows - columns
        return jnp.where((distances >= 0) & (distances < (window or s.size + distances)), s, NEG_INF)


def _product(a: Any, b: Any, shape: Any) -> jax.Array:
    def multiply(ref):
        plgpu.wgmma(ref, a, b)
        return ref[...]

    return pl.run_scoped(multiply, plgpu.ACC(shape, jnp.float32))  # pyright: ignore[reportPrivateImportUsage]
