"""Hopper's KV writes on a GPU: layouts, which the interpreter does not know, and caches of more than 2^31 elements."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.kv_update import kv_update, rope_kv_update

pytestmark = pytest.mark.device
FP8 = jnp.float8_e4m3fn
BLOCK = 16


@pytest.fixture(autouse=True)
def needs_a_gpu() -> None:
    assert jax.default_backend() == "gpu", "these need a Hopper GPU"


@pytest.mark.parametrize(
    ("tokens", "kv_heads", "group", "head_dim"),
    [
        (64, 8, 2, 128),
        (33, 8, 4, 128),
        (9, 32, 1, 128),
        (7, 3, 3, 64),
        (9, 8, 4, 80),
        (9, 4, 1, 96),
        (9, 5, 3, 112),
        (9, 8, 4, 192),
        (5, 1, 8, 256),
        (1, 2, 7, 128),
    ],
)
@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "scale"),
    [(jnp.bfloat16, None, None), (jnp.float16, None, None), (jnp.bfloat16, FP8, None), (jnp.bfloat16, FP8, 0.01)],
)
@pytest.mark.parametrize("has_norm", [True, False])
def test_matches_the_reference(
    tokens: int, kv_heads: int, group: int, head_dim: int, dtype: Any, cache_dtype: Any, scale: Any, has_norm: bool
) -> None:
    rng = np.random.default_rng(tokens)
    blocks = tokens // BLOCK + 3

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), dtype)

    taken = rng.permutation(np.arange(BLOCK, blocks * BLOCK))[: tokens - tokens // 4]
    slots = jnp.asarray(np.concatenate([taken, np.zeros(tokens // 4)]), jnp.int32)
    caches = [jnp.full((blocks, kv_heads, BLOCK, head_dim), jnp.nan, cache_dtype or dtype)] * 2
    qkv = normal(tokens, kv_heads, group + 2, head_dim)
    angles = jnp.asarray(rng.standard_normal((tokens, head_dim // 2)), jnp.float32) * 3
    norms = {"q_norm": normal(head_dim), "k_norm": normal(head_dim)} if has_norm else {}
    scales = {} if scale is None else {"k_scale": jnp.float32(scale), "v_scale": jnp.float32(scale / 2)}
    arguments = (qkv, *caches, jnp.cos(angles), jnp.sin(angles), slots)
    got = rope_kv_update(*arguments, **norms, **scales, implementation="mosaic_gpu")
    with jax.disable_jit():
        want = rope_kv_update(*arguments, **norms, **scales)
    assert_close(got[0], want[0])
    for a, b in zip(got[1:], want[1:], strict=True):
        assert_close(a.at[0, :, 0].set(0), b.at[0, :, 0].set(0))

    rows = (*caches, qkv[:, :, -2], qkv[:, :, -1], slots)
    for a, b in zip(kv_update(*rows, **scales, implementation="mosaic_gpu"), kv_update(*rows, **scales), strict=True):
        assert_close(a.at[0, :, 0].set(0), b.at[0, :, 0].set(0), share=0)


def assert_close(got: jax.Array, want: jax.Array, *, share: float = 0.005) -> None:
    """Within one step of the dtype, in few elements; NaN where the reference has it."""
    step = float(jnp.finfo(got.dtype).eps)
    a, b = np.asarray(got.astype(jnp.float32)), np.asarray(want.astype(jnp.float32))
    np.testing.assert_allclose(a, b, rtol=1.01 * step, atol=1e-6)
    assert np.sum((a != b) & ~np.isnan(b)) <= share * a.size + (2 if share else 0)


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
