"""Compile every tuned product of the Hopper kernel for an H200, with no GPU present."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from absent_devices import h200

from jaxinfer.kernels.linear import arg_specs, mosaic_gpu
from jaxinfer.kernels.linear.tuning import (
    PRODUCER_REGISTERS,
    ManyRowsParams,
    default_params,
    tuned_params,
)

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("name", arg_specs.BENCHMARKS)
def test_compiles_without_spills(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    spec = arg_specs.BENCHMARKS[name]
    product = spec.product
    shape = partial(
        jax.ShapeDtypeStruct,
        dtype=jnp.dtype(spec.dtype),
        sharding=h200(),
    )
    arrays = {"norm_weight": shape((product.size,))} if spec.has_norm else {}
    if spec.has_residual:
        arrays["residual"] = shape((spec.rows, product.columns))
    params = tuned_params(product) or default_params(product)
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
