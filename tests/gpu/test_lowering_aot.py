"""Lowering a kernel starts no process of ptxas but the first."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from absent_devices import h200
from jax.experimental.mosaic.gpu import fragmented_array

from jaxinfer.kernels import lowering
from jaxinfer.kernels.sampling import mosaic_gpu

pytestmark = pytest.mark.aot


def test_ptxas_is_asked_for_its_version_once():
    ask = getattr(fragmented_array.mgpu_lib._mosaic_gpu_ext, lowering.QUESTION)
    before = ask.cache_info()

    sharding = h200()

    def shaped(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    rows = [shaped(jnp.float32, 16), shaped(jnp.uint32, 16, 2), shaped(jnp.int32, 16)]
    jax.jit(mosaic_gpu.sample).trace(shaped(jnp.float32, 16, 32768), *rows).lower(lowering_platforms=("cuda",))
    after = ask.cache_info()
    assert after.hits > before.hits
    assert after.misses <= 1
