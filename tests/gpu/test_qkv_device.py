"""The projection that is fused with rotation and the KV cache, on a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.linear import mosaic_gpu_qkv, qkv_rope_kv_update
from jaxinfer.kernels.linear.arg_specs import make_qkv_inputs
from jaxinfer.kernels.linear.tuning import Params

pytestmark = pytest.mark.device
NUM_BLOCKS, BLOCK_SIZE = 40, 64
SMALL = {"hidden": 1024, "kv_heads": 8, "group": 2, "head_dim": 128}
HALF = {"hidden": 4096, "kv_heads": 4, "group": 4, "head_dim": 128}


@pytest.mark.parametrize(
    ("sizes", "rows", "more", "params"),
    [
        (SMALL, 16, {}, Params(block_n=128, splits=2, num_stages=8)),
        (SMALL, 32, {"has_bias": True}, Params(block_n=128, splits=2, num_stages=4, resident=True)),
        (HALF, 16, {"is_normalised": True}, Params(block_n=128, splits=4, num_stages=10)),
        (HALF, 64, {"has_norm": False}, Params(block_n=128, splits=4, num_stages=8)),
    ],
)
def test_the_fused_projection_gives_its_parts(sizes: dict, rows: int, more: dict, params: Params) -> None:
    assert jax.default_backend() == "gpu", "these need a Hopper GPU"
    arguments, options = make_qkv_inputs(rows=rows, **sizes, **more, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    expected = qkv_rope_kv_update(*arguments, **options)
    fused = jax.jit(partial(mosaic_gpu_qkv.qkv_rope_kv_update, eps=1e-6, params=params))
    is_new = np.isin(np.arange(NUM_BLOCKS * BLOCK_SIZE), np.asarray(arguments[-1])[:-2])
    is_new = is_new.reshape(NUM_BLOCKS, BLOCK_SIZE)
    for _ in range(3):  # a race would show between runs
        (q, *caches), (wanted_q, *wanted) = (
            jax.tree.map(lambda x: np.asarray(x.astype(jnp.float32)), x)
            for x in (fused(*arguments, **options), expected)
        )
        assert np.linalg.norm(q - wanted_q) < 6e-3 * np.linalg.norm(wanted_q)
        for got, right, before in zip(caches, wanted, arguments[2:4], strict=True):
            got, right, before = (np.asarray(x, np.float32).swapaxes(1, 2) for x in (got, right, before))
            assert np.linalg.norm(got[is_new] - right[is_new]) < 6e-3 * np.linalg.norm(right[is_new])
            np.testing.assert_array_equal(got[~is_new], before[~is_new])  # padding rows are dropped
