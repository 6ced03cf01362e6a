"""The projection that is fused with rotation and the KV cache: against its parts, in the GPU interpreter."""

from functools import partial

import jax
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.kernels.kv_update import rope_kv_update
from jaxinfer.kernels.linear import linear, mosaic_gpu_qkv, qkv_rope_kv_update
from jaxinfer.kernels.linear.arg_specs import make_qkv_inputs
from jaxinfer.kernels.linear.tuning import Params

pytestmark = pytest.mark.slow  # of no product this kernel is known to win, so that no engine has it

H200 = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)


@pytest.mark.parametrize(
    ("case", "params"),
    [
        (
            {"rows": 16, "hidden": 128, "kv_heads": 1, "group": 2, "head_dim": 64, "has_bias": False, "has_norm": True},
            Params(block_n=64, splits=2, num_stages=2, exchange="device"),
        ),
        (
            {"rows": 16, "hidden": 512, "kv_heads": 2, "group": 1, "head_dim": 128, "has_bias": True, "has_norm": True},
            Params(block_n=128, splits=8, num_stages=2, exchange="device"),
        ),
        (
            {"rows": 32, "hidden": 64, "kv_heads": 2, "group": 1, "head_dim": 128, "has_bias": True, "has_norm": False},
            Params(block_n=128, splits=1, num_stages=2, exchange="device"),
        ),
        (
            {"rows": 16, "hidden": 128, "kv_heads": 1, "group": 1, "head_dim": 64, "has_bias": False, "has_norm": True}
            | {"is_normalised": True},
            Params(block_n=64, splits=2, num_stages=2, exchange="device"),
        ),
    ],
    ids=["QK-norm", "8 splits", "bias", "no norm before"],
)
def test_matches_its_parts(case: dict, params: Params) -> None:
    arguments, options = make_qkv_inputs(**case)
    expected = jax.block_until_ready(qkv_rope_kv_update(*arguments, **options))
    fused = jax.jit(partial(mosaic_gpu_qkv.qkv_rope_kv_update, eps=1e-6, params=params))
    mesh = AbstractMesh((), (), abstract_device=H200)
    settings = plgpu.InterpretGPUParams(detect_races=True)
    with plgpu.force_gpu_interpret_mode(settings), jax.sharding.use_abstract_mesh(mesh):
        out = jax.block_until_ready(fused(*arguments, **options))
    assert not interpreter.get_races().races_found
    (q, *caches), (expected_q, *expected_caches) = (jax.tree.map(np.float32, x) for x in (out, expected))
    tolerance = 4e-3  # sums in another order round differently before they are normalised
    assert np.linalg.norm(q - expected_q) < tolerance * np.linalg.norm(expected_q)
    num_blocks, _, block_size, _ = arguments[2].shape
    is_new = np.isin(np.arange(num_blocks * block_size), arguments[-1][:-2]).reshape(num_blocks, block_size)
    for got, wanted, before in zip(caches, expected_caches, arguments[2:4], strict=True):
        got, wanted, before = (np.float32(x).swapaxes(1, 2) for x in (got, wanted, before))
        assert np.linalg.norm(got[is_new] - wanted[is_new]) < tolerance * np.linalg.norm(wanted[is_new])
        np.testing.assert_array_equal(got[~is_new], before[~is_new])  # padding rows are dropped


def test_the_reference_is_the_two_operations() -> None:
    arguments, options = make_qkv_inputs(
        rows=4, hidden=32, kv_heads=2, group=1, head_dim=16, has_bias=True, has_norm=True
    )
    x, weight, *rest = arguments
    qkv = linear(x, weight, norm_weight=options["norm_weight"], bias=options["bias"])
    expected = rope_kv_update(qkv, *rest, q_norm=options["q_norm"], k_norm=options["k_norm"])
    for got, wanted in zip(qkv_rope_kv_update(*arguments, **options), expected, strict=True):
        np.testing.assert_array_equal(np.float32(got), np.float32(wanted))


def test_says_what_it_cannot_do() -> None:
    arguments, options = make_qkv_inputs(
        rows=16, hidden=64, kv_heads=1, group=1, head_dim=64, has_bias=False, has_norm=False
    )
    with pytest.raises(NotImplementedError, match="heads of 64"):
        mosaic_gpu_qkv.qkv_rope_kv_update(*arguments, eps=1e-6, params=Params(block_n=128, splits=1), **options)
    arguments, options = make_qkv_inputs(rows=64, hidden=4096, kv_heads=1, group=1, head_dim=128, is_normalised=True)
    wide = Params(block_n=128, splits=1, num_stages=9)  # all of an SM's memory, but for the output's
    with pytest.raises(NotImplementedError, match="and its output need 237568 bytes"):
        mosaic_gpu_qkv.qkv_rope_kv_update(*arguments, eps=1e-6, params=wide, **options)
