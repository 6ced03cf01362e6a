"""The projection that is fused with rotation and the KV cache: against its parts, in the GPU interpreter."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.kernels.kv_update import rope_kv_update
from jaxinfer.kernels.linear import linear, mosaic_gpu_qkv, qkv_rope_kv_update
from jaxinfer.kernels.linear.tuning import Params

pytestmark = pytest.mark.slow  # no layer uses this kernel yet

H200 = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
NUM_BLOCKS, BLOCK_SIZE = 4, 16


def make_inputs(
    *, rows: int, hidden: int, kv_heads: int, group: int, head_dim: int, has_bias: bool, has_norm: bool
) -> tuple[tuple, dict]:
    """Positional arguments and options; the last two rows are padding."""
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(shape: tuple[int, ...], scale: float = 1.0, mean: float = 0.0) -> jax.Array:
        return (jax.random.normal(next(keys), shape) * scale + mean).astype(jnp.bfloat16)

    heads = (kv_heads, group + 2, head_dim)
    x, weight = normal((rows, hidden), 3.0), normal((hidden, *heads), hidden**-0.5)
    caches = [normal((NUM_BLOCKS, kv_heads, BLOCK_SIZE, head_dim)) for _ in range(2)]
    angles = jax.random.normal(next(keys), (rows, head_dim // 2))
    slots = np.random.default_rng(0).permutation(np.arange(BLOCK_SIZE, NUM_BLOCKS * BLOCK_SIZE))[:rows]
    slots[-2:] = 0
    options = {"norm_weight": normal((hidden,), 0.2, 1.0), "bias": normal(heads) if has_bias else None}
    norms = [normal((head_dim,), 0.2, 1.0) if has_norm else None for _ in range(2)]
    options |= dict(zip(("q_norm", "k_norm"), norms, strict=True))
    return (x, weight, *caches, jnp.cos(angles), jnp.sin(angles), jnp.asarray(slots, jnp.int32)), options


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
    ],
    ids=["QK-norm", "8 splits", "bias"],
)
def test_matches_its_parts(case: dict, params: Params) -> None:
    arguments, options = make_inputs(**case)
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
    is_new = np.isin(np.arange(NUM_BLOCKS * BLOCK_SIZE), arguments[-1][:-2]).reshape(NUM_BLOCKS, BLOCK_SIZE)
    for got, wanted, before in zip(caches, expected_caches, arguments[2:4], strict=True):
        got, wanted, before = (np.float32(x).swapaxes(1, 2) for x in (got, wanted, before))
        assert np.linalg.norm(got[is_new] - wanted[is_new]) < tolerance * np.linalg.norm(wanted[is_new])
        np.testing.assert_array_equal(got[~is_new], before[~is_new])  # padding rows are dropped


def test_the_reference_is_the_two_operations() -> None:
    arguments, options = make_inputs(rows=4, hidden=32, kv_heads=2, group=1, head_dim=16, has_bias=True, has_norm=True)
    x, weight, *rest = arguments
    qkv = linear(x, weight, norm_weight=options["norm_weight"], bias=options["bias"])
    expected = rope_kv_update(qkv, *rest, q_norm=options["q_norm"], k_norm=options["k_norm"])
    for got, wanted in zip(qkv_rope_kv_update(*arguments, **options), expected, strict=True):
        np.testing.assert_array_equal(np.float32(got), np.float32(wanted))


def test_says_what_it_cannot_do() -> None:
    arguments, options = make_inputs(
        rows=16, hidden=64, kv_heads=1, group=1, head_dim=64, has_bias=False, has_norm=False
    )
    with pytest.raises(NotImplementedError, match="heads of 64"):
        mosaic_gpu_qkv.qkv_rope_kv_update(*arguments, eps=1e-6, params=Params(block_n=128, splits=1), **options)
