"""Hopper's KV writes on a GPU: layouts, which the interpreter does not know, and caches of more than 2^31 elements."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.kv_update import kv_update, rope_kv_update

pytestmark = pytest.mark.device
BF16, F16, FP8 = jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn
BLOCK = 16


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    assert jax.default_backend() == "gpu", "these need a Hopper GPU"


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "group", "head_dim", "dtype", "cache_dtype", "scale", "has_norm"),
    [
        (64, 8, 2, 128, BF16, BF16, None, True),
        (33, 8, 4, 128, BF16, FP8, None, True),
        (9, 32, 1, 128, F16, F16, None, False),
        (7, 3, 3, 64, BF16, FP8, 0.01, False),
        (9, 8, 4, 80, BF16, BF16, None, True),
        (9, 4, 1, 96, F16, F16, None, True),
        (9, 5, 3, 112, BF16, BF16, None, False),
        (9, 8, 4, 192, BF16, FP8, 1.7, True),
        (5, 1, 8, 256, BF16, BF16, None, True),
        (1, 2, 7, 128, BF16, BF16, None, False),
    ],
)
def test_matches_the_reference(
    tokens: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    dtype: Any,
    cache_dtype: Any,
    scale: float | None,
    has_norm: bool,
) -> None:
    rng = np.random.default_rng(tokens)
    blocks = tokens // BLOCK + 3

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(dtype)

    taken = rng.permutation(np.arange(BLOCK, blocks * BLOCK))[: tokens - tokens // 4]
    slots = np.concatenate([taken, np.zeros(tokens // 4)]).astype(np.int32)
    caches = [np.full((blocks, kv_heads, BLOCK, head_dim), np.nan, cache_dtype)] * 2
    qkv = normal(tokens, kv_heads, group + 2, head_dim)
    angles = 3 * rng.standard_normal((tokens, head_dim // 2)).astype(np.float32)
    norms = {"q_norm": normal(head_dim), "k_norm": normal(head_dim)} if has_norm else {}
    scales = {} if scale is None else {"k_scale": np.float32(scale), "v_scale": np.float32(scale / 2)}
    arguments = (qkv, *caches, np.cos(angles), np.sin(angles), slots)
    got = rope_kv_update(*arguments, **norms, **scales, implementation="mosaic_gpu")
    # With excess precision XLA would leave out the roundings between norm, weight and rotation.
    exact = partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    want = exact(rope_kv_update)(*arguments, **norms, **scales)
    assert_close(got[0], want[0])
    for a, b in zip(got[1:], want[1:], strict=True):
        assert_close(without_null_slot(a), without_null_slot(b))

    rows = (*caches, qkv[:, :, -2], qkv[:, :, -1], slots)
    got = kv_update(*rows, **scales, implementation="mosaic_gpu")
    for a, b in zip(got, kv_update(*rows, **scales), strict=True):
        np.testing.assert_array_equal(without_null_slot(a).view(np.uint8), without_null_slot(b).view(np.uint8))


def without_null_slot(cache: jax.Array) -> np.ndarray:
    """The null block's first slot holds any of the padding rows, or what it held."""
    return np.asarray(cache).swapaxes(1, 2).reshape(cache.shape[0] * BLOCK, -1)[1:].copy()


def assert_close(got: Any, want: Any) -> None:
    """Within one step of the dtype, in few elements; NaN where the reference has it."""
    step = float(jnp.finfo(got.dtype).eps)
    a, b = (np.asarray(x).astype(np.float32) for x in (got, want))
    np.testing.assert_allclose(a, b, rtol=1.01 * step, atol=1e-6)
    assert np.sum((a != b) & ~np.isnan(b)) <= 2 + a.size // 200


def test_blocks_beyond_32_bits() -> None:
    """Rows far behind element 2^31 arrive, and nothing else changes."""
    shape, tokens = (33_500, 8, 64, 128), 64
    caches = [jnp.zeros(shape, FP8), jnp.zeros(shape, FP8)]
    address = caches[0].unsafe_buffer_pointer()
    slots = np.random.default_rng(0).permutation(np.arange((shape[0] - 40) * 64, shape[0] * 64))[:tokens]
    slots = jnp.asarray(slots, jnp.int32)
    rows = jnp.ones((tokens, *shape[1:4:2]), jnp.bfloat16)
    update = jax.jit(lambda *x: kv_update(*x, implementation="mosaic_gpu"), donate_argnums=(0, 1))
    k_cache, v_cache = update(*caches, rows, 2 * rows, slots)
    assert k_cache.unsafe_buffer_pointer() == address
    for cache, value in ((k_cache, 1), (v_cache, 2)):
        assert (np.asarray(cache[slots // 64, :, slots % 64].astype(jnp.float32)) == value).all()
        count = jax.jit(lambda x: jnp.sum(x.astype(jnp.float32) != 0, dtype=jnp.int32))(cache)
        assert int(count) == rows.size
