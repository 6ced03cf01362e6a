"""Compile every tuned product of the Hopper kernel for an H200, with no GPU present."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absent_devices import h200

from jaxinfer.kernels.linear import arg_specs, mosaic_gpu
from jaxinfer.kernels.linear.tuning import (
    PRODUCER_REGISTERS,
    ManyRowsParams,
    Product,
    default_params,
    tuned_params,
)

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("name", arg_specs.BENCHMARKS)
def test_compiles_without_spills(name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    spec = arg_specs.BENCHMARKS[name]
    segments = 1 if spec.activation is None else 2
    size = int(np.prod(spec.inputs))
    product = Product(spec.rows, size, segments, int(np.prod(spec.outputs)) // segments)
    shape = partial(
        jax.ShapeDtypeStruct,
        dtype=jnp.dtype(spec.dtype),
        sharding=h200(),
    )
    arrays = {"norm_weight": shape((size,))} if spec.has_norm else {}
    if spec.has_residual:
        arrays["residual"] = shape((spec.rows, product.columns))
    params = tuned_params(product) or default_params(product)
    multiply = partial(mosaic_gpu.linear, activation=spec.activation, params=params)
    jax.jit(multiply).lower(shape((spec.rows, size)), shape((size, segments, product.columns)), **arrays).compile()
    report = capfd.readouterr().out
    print(report)
    assert re.findall(r"(\d+) bytes spill stores", report) == ["0"]
    consumers = spec.rows // params.consumer_rows if isinstance(params, ManyRowsParams) else 1
    if isinstance(params, ManyRowsParams) and consumers > 1:
        # what its warpgroups ask for later has to be there from the start
        (launched,) = map(int, re.findall(r"Used (\d+) registers", report))
        asked = consumers * params.consumer_registers(spec.rows) + PRODUCER_REGISTERS
        assert asked <= launched * (consumers + 1)
