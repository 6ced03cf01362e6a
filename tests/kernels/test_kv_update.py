"""KV writes: right slots, in place."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.kv_update import kv_update


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


def test_misfits_are_refused():
    page = jnp.zeros((4, 2, 16, 8))
    with pytest.raises(ValueError, match="do not fit caches"):
        kv_update(page, page, jnp.zeros((3, 1, 8)), jnp.zeros((3, 1, 8)), jnp.zeros(3, jnp.int32))
    with pytest.raises(ValueError, match="slot_mapping"):
        kv_update(page, page, jnp.zeros((3, 2, 8)), jnp.zeros((3, 2, 8)), jnp.zeros(4, jnp.int32))
