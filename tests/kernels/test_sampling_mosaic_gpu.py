"""Hopper's sampling kernels against the reference, in the GPU interpreter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.kernels.sampling import arg_specs, mosaic_gpu, mosaic_gpu_cuts, mosaic_gpu_tiles, reference
from jaxinfer.kernels.sampling.arg_specs import Inputs, Spec

H200 = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
PARAMS = mosaic_gpu.Params(mosaic_gpu_tiles.TilesParams(num_sms=1), mosaic_gpu_cuts.CutsParams(num_stages=1))


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Runs kernels in the GPU interpreter; fails if it saw a race."""
    params = plgpu.InterpretGPUParams(detect_races=True)
    mesh = AbstractMesh((), (), abstract_device=H200)
    with plgpu.force_gpu_interpret_mode(params), jax.sharding.use_abstract_mesh(mesh):
        yield
    assert not interpreter.get_races().races_found


def run(inputs: Inputs) -> np.ndarray:
    """The tokens; kernels are programs of their own, since the interpreter may wait for ever beside other work."""
    with interpreted():
        return np.asarray(jax.block_until_ready(mosaic_gpu.sample(*inputs[:4], **inputs.cuts, params=PARAMS)))


def assert_same(inputs: Inputs, tokens: np.ndarray) -> None:
    expected = jax.jit(reference.sample)(*inputs[:4], **inputs.cuts)
    np.testing.assert_array_equal(tokens, np.asarray(expected))


def test_rows_that_are_not_cut() -> None:
    """Two blocks a row, which overlap; greedy and drawn rows."""
    inputs = arg_specs.make_inputs(Spec(4, 65 * 128, (0.0, 1.0, 0.3, 2.0)), seed=0)
    assert_same(inputs, run(inputs))


CUTS = {
    "top-k": Spec(3, 65 * 128, (1.0,), top_k=(5, 1, 40)),
    "top-p": Spec(3, 65 * 128, (1.0,), top_p=(0.5, 0.9, 0.01), peak=8.0),
    "all": Spec(4, 65 * 128, (0.7, 0.0), min_p=(0.01, 0.0), top_k=(40, 7, 65 * 128), top_p=(0.9, 1.0, 0.5), peak=8.0),
}


@pytest.mark.parametrize("name", CUTS)
def test_cut_rows(name: str) -> None:
    inputs = arg_specs.make_inputs(CUTS[name], seed=1)
    assert_same(inputs, run(inputs))
