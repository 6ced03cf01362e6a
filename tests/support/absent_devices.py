"""Devices to compile for that are not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from jax.experimental import topologies

from jaxinfer.sharding.mesh import make_mesh

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
    return jax.sharding.SingleDeviceSharding(h200_topology(1).devices[0])


def h200_mesh(size: int) -> jax.sharding.Mesh:
    """A tensor axis over H200s of one host."""
    return make_mesh({"tensor": size}, h200_topology(size).devices)


def h200_topology(size: int) -> Any:
    return topologies.get_topology_desc(platform="cuda", target_config=H200, topology=f"1x1x{size}")


@contextmanager
def tpu(topology_name: str) -> Iterator[jax.sharding.Sharding]:
    """One device of a topology such as "v6e:2x2"."""
    with tpu_topology(topology_name) as topology:
        yield jax.sharding.SingleDeviceSharding(topology.devices[0])


@contextmanager
def tpu_mesh(topology_name: str) -> Iterator[jax.sharding.Mesh]:
    """A tensor axis over all devices of a topology."""
    with tpu_topology(topology_name) as topology:
        yield make_mesh({"tensor": len(topology.devices)}, topology.devices)


@contextmanager
def tpu_topology(name: str) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in TPU_ENVIRONMENT.items():
            patch.setenv(variable, value)
        yield topologies.get_topology_desc(platform="tpu", topology_name=name)
