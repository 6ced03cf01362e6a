"""Compile the projection that is fused with rotation and the KV cache for an H200, and whole steps with it."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from absent_devices import h200, h200_mesh
from step_programs import Kernels, check_in_place, compile_step, count_kernels

from jaxinfer.batch import BatchShape
from jaxinfer.kernels.linear import api, mosaic_gpu_qkv
from jaxinfer.kernels.linear.tuning import Params, Product, tuned_params

pytestmark = pytest.mark.aot
SHAPE = BatchShape(num_tokens=16, num_rows=16, is_decode=True, block_size=64)


@pytest.mark.parametrize(
    ("rows", "hidden", "kv_heads", "group", "params"),
    [
        (16, 1024, 8, 2, Params(block_n=128, splits=2, num_stages=8)),
        (32, 1024, 8, 2, Params(block_n=128, splits=2, num_stages=4, resident=True)),
        (16, 4096, 4, 4, Params(block_n=128, splits=4, num_stages=10)),
        (64, 4096, 8, 4, Params(block_n=128, splits=2, num_stages=8)),
    ],
)
@pytest.mark.parametrize("has_norm", [True, False])
def test_compiles_without_spills(
    rows: int,
    hidden: int,
    kv_heads: int,
    group: int,
    params: Params,
    has_norm: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """With QK-norms, in bf16. Caches stay where they are."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16, sharding=h200())
    angles = shape((rows, 64), dtype=jnp.float32)
    cache = shape((1000, kv_heads, 64, 128))
    project = partial(mosaic_gpu_qkv.qkv_rope_kv_update, eps=1e-6, bias=None, params=params)
    arguments = (shape((rows, hidden)), shape((hidden, kv_heads, group + 2, 128)), cache, cache, angles, angles)
    norms = {"q_norm": shape((128,)), "k_norm": shape((128,))}
    lowered = jax.jit(project, donate_argnums=(2, 3)).lower(
        *arguments, shape((rows,), dtype=jnp.int32), norm_weight=shape((hidden,)) if has_norm else None, **norms
    )
    compiled = lowered.compile()
    report = capfd.readouterr().out
    print(report)
    assert re.findall(r"(\d+) bytes spill stores", report) == ["0"]
    assert compiled.memory_analysis().temp_size_in_bytes < 1 << 20


@pytest.mark.parametrize("devices", [1, 2])
def test_a_step_has_a_kernel_less_a_layer(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the parameters say so."""

    def tuned(product: Product, *, head_dim: int | None = None) -> object:
        return tuned_params(product) if head_dim is None else Params(block_n=head_dim, splits=2, num_stages=6)

    where = h200() if devices == 1 else h200_mesh(devices)
    kernels, counts = Kernels.all("mosaic_gpu"), []
    for find in (tuned_params, tuned):
        monkeypatch.setattr(api, "tuned_params", find)
        jax.clear_caches()  # of layers traced
        compiled, cache = compile_step(where, SHAPE, kernels, num_blocks=4000)
        check_in_place(compiled, cache)
        counts.append(sum(count_kernels(compiled).values()))
    print(counts)
    assert counts[1] <= counts[0] - 2
