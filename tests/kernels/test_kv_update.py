"""KV writes: right slots, in place; alone and with QK-norm and rotation before."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxinfer.kernels.kv_update import choose, kv_update, plan, rope_kv_update

FP8 = jnp.float8_e4m3fn


@pytest.mark.parametrize("block_size", [1, 16, 24])
def test_rows_go_to_their_slots(block_size):
    rng = np.random.default_rng(0)
    shape = (7, 3, block_size, 8)
    k_cache, v_cache = rng.standard_normal((2, *shape)).astype(np.float32)
    slots = rng.permutation(np.arange(block_size, 7 * block_size))[: min(9, 6 * block_size)].astype(np.int32)
    k, v = rng.standard_normal((2, len(slots), 3, 8)).astype(np.float32)
    got_k, got_v = kv_update(*map(jnp.asarray, (k_cache, v_cache, k, v, slots)))
    for token, slot in enumerate(slots):
        k_cache[slot // block_size, :, slot % block_size] = k[token]
        v_cache[slot // block_size, :, slot % block_size] = v[token]
    np.testing.assert_array_equal(got_k, k_cache)
    np.testing.assert_array_equal(got_v, v_cache)


def test_donated_caches_are_written_in_place():
    page = jax.ShapeDtypeStruct((4000, 2, 16, 32), jnp.float32)
    rows = jax.ShapeDtypeStruct((64, 2, 32), jnp.float32)
    slots = jax.ShapeDtypeStruct((64,), jnp.int32)
    compiled = jax.jit(kv_update, donate_argnums=(0, 1)).lower(page, page, rows, rows, slots).compile()
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes == 2 * 4000 * 2 * 16 * 32 * 4
    assert analysis.temp_size_in_bytes < 1 << 20
    arrays = [jnp.zeros(page.shape), jnp.zeros(page.shape), jnp.ones(rows.shape), jnp.ones(rows.shape)]
    before = arrays[0].unsafe_buffer_pointer()
    k_cache, _ = compiled(*arrays, jnp.arange(64, dtype=jnp.int32))
    assert k_cache.unsafe_buffer_pointer() == before


@pytest.mark.parametrize("scale", [None, 0.25])
def test_float8_caches_are_scaled_and_saturate(scale):
    """Beyond 448 float8_e4m3fn has NaN only: values stop there."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((2, 6, 2, 16)).astype(np.float32)
    rows[:, 0, 0, :4] = [1e6, -1e6, 500.0, -449.0]
    slots = np.array([17, 3, 9, 40, 31, 5], np.int32)
    caches = [jnp.full((3, 2, 16, 16), jnp.nan, FP8)] * 2
    scales = {} if scale is None else {"k_scale": jnp.float32(scale), "v_scale": jnp.float32(2 * scale)}
    got = kv_update(*caches, *map(jnp.asarray, rows), jnp.asarray(slots), **scales)
    divisors = (1, 1) if scale is None else (scale, 2 * scale)
    for out, new, divisor in zip(got, rows, divisors, strict=True):
        want = np.clip(new / np.float32(divisor), -448, 448).astype(ml_dtypes.float8_e4m3fn)
        stored = np.asarray(out)[slots // 16, :, slots % 16]
        np.testing.assert_array_equal(stored.view(np.uint8), want.view(np.uint8))
        assert np.isnan(np.asarray(out).astype(np.float32)).sum() == out.size - want.size


@pytest.mark.parametrize("has_norm", [True, False])
def test_norm_and_rotation_come_before_the_write(has_norm):
    """Against complex numbers: components i and i + head_dim / 2 are one number, turned by the angle."""
    rng = np.random.default_rng(2)
    tokens, kv_heads, group, half = 5, 2, 3, 8
    qkv = rng.standard_normal((tokens, kv_heads, group + 2, 2 * half)).astype(np.float32)
    weights = rng.standard_normal((2, 2 * half)).astype(np.float32)
    angles = rng.standard_normal((tokens, half)).astype(np.float32)
    slots = np.array([4, 30, 17, 9, 10], np.int32)
    caches = jnp.zeros((2, 3, kv_heads, 16, 2 * half))
    norms = {"q_norm": jnp.asarray(weights[0]), "k_norm": jnp.asarray(weights[1]), "eps": 1e-3} if has_norm else {}
    q, k_cache, v_cache = rope_kv_update(
        jnp.asarray(qkv), *caches, jnp.cos(angles), jnp.sin(angles), jnp.asarray(slots), **norms
    )

    def turned(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        if has_norm:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-3) * weight
        number = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None, None]
        return np.concatenate([number.real, number.imag], axis=-1)

    want = turned(qkv[:, :, :group], weights[0]).reshape(tokens, -1, 2 * half)
    np.testing.assert_allclose(q, want, rtol=1e-5, atol=1e-5)
    written = np.asarray(k_cache)[slots // 16, :, slots % 16]
    np.testing.assert_allclose(written, turned(qkv[:, :, group : group + 1], weights[1])[:, :, 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(np.asarray(v_cache)[slots // 16, :, slots % 16], qkv[:, :, -1])


def test_misfits_are_refused():
    page = jnp.zeros((4, 2, 16, 8))
    with pytest.raises(ValueError, match="do not fit caches"):
        kv_update(page, page, jnp.zeros((3, 1, 8)), jnp.zeros((3, 1, 8)), jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="slot_mapping"):
        kv_update(page, page, jnp.zeros((3, 2, 8)), jnp.zeros((3, 2, 8)), jnp.zeros(4, jnp.int32))
    with pytest.raises(ValueError, match="differ"):
        kv_update(page, page, jnp.zeros((3, 2, 8)), jnp.zeros((3, 2, 4)), jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match=r"float8_e4m3fn"):
        kv_update(page, page.astype(FP8), jnp.zeros((3, 2, 8)), jnp.zeros((3, 2, 8)), jnp.zeros(3, jnp.int32))
    with pytest.raises(NotImplementedError, match="'nothing'"):
        kv_update(
            *(page, page, jnp.zeros((3, 2, 8)), jnp.zeros((3, 2, 8)), jnp.zeros(3, jnp.int32)),
            implementation="nothing",
        )
    angles = jnp.zeros((3, 4))
    with pytest.raises(ValueError, match="does not fit cos"):
        rope_kv_update(jnp.zeros((3, 2, 3, 8)), page, page, angles[:, :3], angles, jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="q_norm and k_norm"):
        rope_kv_update(
            *(jnp.zeros((3, 2, 3, 8)), page, page, angles, angles, jnp.zeros(3, jnp.int32)), q_norm=jnp.ones(8)
        )


def test_who_serves_what():
    """Hopper's and the TPU's kernels where they can, the reference everywhere else; only the TPU's has a plan."""
    bf16, f32 = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
    kind = {"compute_capability": "9.0", "dtype": bf16, "cache_dtype": bf16, "num_heads": 16, "num_kv_heads": 8,
            "head_dim": 128, "block_size": 64, "num_tokens": 8192}  # fmt: skip
    for change in ({}, {"head_dim": 80}, {"cache_dtype": jnp.dtype(FP8)}, {"block_size": 1}):
        assert choose("gpu", **{**kind, **change}) == "mosaic_gpu"
    for change in ({"compute_capability": "8.0"}, {"dtype": f32}, {"cache_dtype": f32}, {"head_dim": 72}):
        assert choose("gpu", **{**kind, **change}) == "reference"
    for change in ({}, {"cache_dtype": f32}):
        assert choose("tpu", **{**kind, **change}) == "mosaic_tpu"
    for change in ({"head_dim": 64}, {"block_size": 4}, {"cache_dtype": jnp.dtype(FP8)}, {"num_tokens": 1 << 20}):
        assert choose("tpu", **{**kind, **change}) == "reference"
    assert choose("cpu", **kind) == "reference"
    assert plan("reference", jnp.zeros(4, jnp.int32)) is None
    assert plan("mosaic_gpu", jnp.zeros(4, jnp.int32)) is None
    assert plan("mosaic_tpu", jnp.zeros(4, jnp.int32)).slots.shape == (4,)
