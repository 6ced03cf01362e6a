"""The Hopper kernel against the reference, in the GPU interpreter."""

import contextlib
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.kernels.linear import arg_specs, linear, mosaic_gpu
from jaxinfer.kernels.linear.arg_specs import Spec
from jaxinfer.kernels.linear.tuning import ManyRowsParams, Params

H200 = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run kernels in the GPU interpreter, which skips inline_mgpu; fail if it saw a race."""
    mesh = AbstractMesh((), (), abstract_device=H200)
    settings = plgpu.InterpretGPUParams(detect_races=True, inline_mgpu="ignore")
    with plgpu.force_gpu_interpret_mode(settings), jax.sharding.use_abstract_mesh(mesh):
        yield
    assert not interpreter.get_races().races_found


def run(spec: Spec, x: jax.Array, weight: jax.Array, options: dict, params: Params | ManyRowsParams) -> np.ndarray:
    segments = 1 if spec.activation is None else 2
    if "bias" in options:
        options = options | {"bias": options["bias"].reshape(segments, -1)}
    weight = weight.reshape(weight.shape[0], segments, -1)
    multiply = partial(mosaic_gpu.linear, activation=spec.activation, params=params)
    with interpreted():
        out = jax.block_until_ready(jax.jit(multiply)(x, weight, **options))
    return np.asarray(out.astype(jnp.float32))


def params(**changes) -> Params:
    """The interpreter knows neither programmatic launches nor shared memory of other CTAs."""
    return Params(**({"block_n": 64, "num_stages": 2, "exchange": "device"} | changes))


def many(**changes) -> ManyRowsParams:
    """A cluster's warpgroups are at most 8: as many threads has the interpreter, and all may have to wait at once."""
    return ManyRowsParams(**({"block_n": 64, "num_stages": 2, "exchange": "device"} | changes))


CASES = {
    "one tile": (Spec(16, (64,), (64,)), params(splits=1)),
    "ring is reused": (Spec(16, (256,), (64,)), params(splits=1)),
    "norm, residual, splits": (Spec(16, (256,), (128,), has_norm=True, has_residual=True), params(splits=2)),
    "gated, wide tiles, f16": (
        Spec(32, (256,), (2, 64), has_norm=True, has_bias=True, activation="silu", dtype="float16"),
        params(splits=2, block_k=128),
    ),
    "norm by the cluster": (Spec(32, (256,), (64,), has_norm=True), params(splits=2, resident=True)),
    "8 splits, bias": (Spec(48, (512,), (128,), has_bias=True), params(splits=8, block_n=128)),
    "many rows, one part": (Spec(64, (192,), (128,), has_norm=True, has_bias=True), many(splits=1)),
    "many rows, splits": (Spec(128, (256,), (192,), has_residual=True), many(splits=2, block_n=96)),
    "norm apart": (Spec(16, (256,), (64,), has_norm=True), params(splits=2, norm_apart=True)),
    "many rows, gated": (
        Spec(192, (256,), (2, 64), has_norm=True, has_residual=True, activation="silu"),
        many(splits=1),
    ),
    "many rows, gated, splits, f16": (
        Spec(128, (256,), (2, 128), has_bias=True, activation="silu", dtype="float16"),
        many(splits=2, block_n=128, consumer_rows=128, block_k=128),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name: str) -> None:
    spec, tuning = CASES[name]
    x, weight, options = jax.block_until_ready(arg_specs.make_inputs(spec, seed=0))
    # The reference in float32: in bf16 it rounds between bias, activation and sum, the kernel only at the end.
    wide_x, wide_weight, wide_options = jax.tree.map(lambda a: a.astype(jnp.float32), (x, weight, options))
    expected = np.asarray(linear(wide_x, wide_weight, activation=spec.activation, **wide_options))
    out = run(spec, x, weight, options, tuning)
    error = np.linalg.norm(out - expected) / np.linalg.norm(expected)
    assert error < 4e-3  # the norm's output and the result are rounded to 8 bits each


@pytest.mark.parametrize(("rows", "tuning"), [(16, params(splits=2)), (128, many(splits=2))], ids=["few", "many"])
def test_rows_do_not_depend_on_others(rows: int, tuning: Params | ManyRowsParams) -> None:
    spec = Spec(rows, (128,), (64,), has_norm=True, has_residual=True)
    x, weight, options = arg_specs.make_inputs(spec, seed=1)
    other = x.at[5].set(jnp.nan).at[7].multiply(100)
    outs = [run(spec, array, weight, options, tuning) for array in (x, other)]
    same = ~np.isin(np.arange(rows), (5, 7))
    np.testing.assert_array_equal(outs[0][same], outs[1][same])
    assert np.isnan(outs[1][5]).all()


def test_says_what_it_cannot_do() -> None:
    x, weight = jnp.zeros((16, 128)), jnp.zeros((128, 1, 64))
    with pytest.raises(NotImplementedError, match="float32"):
        mosaic_gpu.linear(x, weight, params=params(splits=1))
