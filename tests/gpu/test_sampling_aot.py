"""Compile the Hopper sampling kernels for an H200, with no GPU present."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies

from jaxinfer.kernels.sampling import mosaic_gpu

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


@pytest.mark.parametrize(
    ("num_rows", "vocab", "is_cut"),
    [(256, 151936, False), (256, 151936, True), (1, 49152, True), (5, 50257, True)],
)
def test_compiles_without_spills(
    num_rows: int, vocab: int, is_cut: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    topology = topologies.get_topology_desc(platform="cuda", target_config=H200, topology="1x1x1")
    shape = partial(jax.ShapeDtypeStruct, sharding=jax.sharding.SingleDeviceSharding(topology.devices[0]))
    column = partial(shape, (num_rows,))
    cuts = {"min_p": column(jnp.float32), "top_k": column(jnp.int32), "top_p": column(jnp.float32)}
    arguments = shape((num_rows, vocab), jnp.float32), column(jnp.float32), shape((num_rows, 2), jnp.uint32)
    compiled = jax.jit(mosaic_gpu.sample).lower(*arguments, column(jnp.int32), **(cuts if is_cut else {})).compile()
    report = capfd.readouterr().out
    print(re.sub(r"(?m)^ptxas \S+, line .*\n", "", report))
    functions = r"Function properties for (sampling_\w+?)_mosaic_gpu_kernel.*?(\d+) bytes spill stores"
    spills = dict(re.findall(functions, report, re.DOTALL))
    assert spills == {"sampling_tiles": "0", "sampling_cuts" if is_cut else "sampling_pick": "0"}
    logits_bytes = 4 * num_rows * vocab
    needs_copy = vocab % 128 != 0
    assert (compiled.memory_analysis().temp_size_in_bytes > logits_bytes) == needs_copy
