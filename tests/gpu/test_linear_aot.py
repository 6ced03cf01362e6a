"""Compile every tuned product of the Hopper kernel for an H200, with no GPU present."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies

from jaxinfer.kernels.linear import arg_specs, mosaic_gpu
from jaxinfer.kernels.linear.tuning import Product, default_params, tuned_params

pytestmark = pytest.mark.aot
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 } core_count: 132 threads_per_warp: 32
  threads_per_block_limit: 1024 threads_per_core_limit: 2048 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150754820096
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } device_description_str: "NVIDIA H200"
"""


@pytest.mark.parametrize("name", arg_specs.BENCHMARKS)
def test_compiles_without_spills(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    spec = arg_specs.BENCHMARKS[name]
    segments = 1 if spec.activation is None else 2
    size = int(np.prod(spec.inputs))
    product = Product(spec.rows, size, segments, int(np.prod(spec.outputs)) // segments)
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    shape = partial(
        jax.ShapeDtypeStruct,
        dtype=jnp.dtype(spec.dtype),
        sharding=jax.sharding.SingleDeviceSharding(topology.devices[0]),
    )
    arrays = {"norm_weight": shape((size,))} if spec.has_norm else {}
    if spec.has_residual:
        arrays["residual"] = shape((spec.rows, product.columns))
    multiply = partial(
        mosaic_gpu.linear, activation=spec.activation, params=tuned_params(product) or default_params(product)
    )
    jax.jit(multiply).lower(shape((spec.rows, size)), shape((size, segments, product.columns)), **arrays).compile()
    report = capfd.readouterr().out
    print(report)
    assert re.findall(r"(\d+) bytes spill stores", report) == ["0"]
