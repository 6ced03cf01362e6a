"""Devices to compile for that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
import pytest
from jax.experimental import topologies

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
TPU_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # there is no metadata server to ask
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def h200() -> jax.sharding.Sharding:
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


@contextmanager
def tpu(topology_name: str) -> Iterator[jax.sharding.Sharding]:
    """One device of a topology such as "v6e:2x2"."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TPU_ENVIRONMENT.items():
            patch.setenv(name, value)
        topology = topologies.get_topology_desc(platform="tpu", topology_name=topology_name)
        yield jax.sharding.SingleDeviceSharding(topology.devices[0])
