"""Compile every tuned product of the Hopper kernel for an H200, with no GPU present."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from absent_devices import h200

from jaxinfer.kernels.linear import arg_specs, mosaic_gpu
from jaxinfer.kernels.linear.arg_specs import Spec
from jaxinfer.kernels.linear.tuning import PRODUCER_REGISTERS, ManyRowsParams, Params, default_params, tuned_params

pytestmark = pytest.mark.aot


OTHERS: dict[str, tuple[Spec, Params | ManyRowsParams]] = {
    "few rows, 192, norm and bias": (
        Spec(192, (2048,), (4096,), has_norm=True, has_bias=True, dtype="float16"),
        Params(splits=2, num_stages=4),
    ),
    "one part, bias, f16": (
        Spec(128, (1024,), (4096,), has_bias=True, has_residual=True, dtype="float16"),
        ManyRowsParams(splits=1),
    ),
    "gated, splits, bias, residual": (
        Spec(256, (4096,), (2, 3072), has_bias=True, has_residual=True, activation="silu"),
        ManyRowsParams(block_n=192, splits=2, consumer_rows=128),
    ),
    "swizzled tiles of 32": (Spec(192, (4096,), (6144,), has_residual=True), ManyRowsParams(block_n=96, splits=2)),
    "deep tiles": (Spec(64, (4096,), (4096,), has_norm=True), ManyRowsParams(block_n=64, splits=2, block_k=128)),
    "x shared, 256 rows": (
        Spec(256, (4096,), (2, 12288), has_residual=True, activation="silu"),
        ManyRowsParams.filling(192, 1, 128, rows=256, shares_x=True),
    ),
    "x shared, 128 rows": (
        Spec(128, (4096,), (2, 6144), has_bias=True, activation="silu"),
        ManyRowsParams.filling(96, 1, 64, rows=128, shares_x=True),
    ),
    "8 parts": (Spec(128, (4096,), (1024,)), ManyRowsParams(block_n=64, splits=8)),
}
"""What no benchmark has."""


@pytest.mark.parametrize("name", [*arg_specs.BENCHMARKS, *OTHERS])
def test_compiles_without_spills(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    if name in OTHERS:
        spec, params = OTHERS[name]
    else:
        spec = arg_specs.BENCHMARKS[name]
        params = tuned_params(spec.product) or default_params(spec.product)
    product = spec.product
    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(spec.dtype), sharding=h200())
    arrays = {"norm_weight": shape((product.size,))} if spec.has_norm else {}
    if spec.has_bias:
        arrays["bias"] = shape((product.segments, product.columns))
    if spec.has_residual:
        arrays["residual"] = shape((spec.rows, product.columns))
    multiply = partial(mosaic_gpu.linear, activation=spec.activation, params=params)
    x, weight = shape((spec.rows, product.size)), shape((product.size, product.segments, product.columns))
    jax.jit(multiply).lower(x, weight, **arrays).compile()
    report = capfd.readouterr().out
    print(report)
    assert re.findall(r"(\d+) bytes spill stores", report) == ["0"]
    consumers = spec.rows // params.consumer_rows if isinstance(params, ManyRowsParams) else 1
    if isinstance(params, ManyRowsParams) and consumers > 1:
        # what its warpgroups ask for later has to be there from the start
        (launched,) = map(int, re.findall(r"Used (\d+) registers", report))
        asked = consumers * params.consumer_registers(spec.rows) + PRODUCER_REGISTERS
        assert asked <= launched * (consumers + 1)
