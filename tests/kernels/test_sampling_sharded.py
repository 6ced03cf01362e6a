"""Sampling where a row's logits are spread over devices: the same tokens as with all of them on one."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxinfer.kernels.sampling import sample, sample_sharded
from jaxinfer.sharding.mesh import make_mesh

VOCAB, ROWS = 1500, 64


def rows(rng: np.random.Generator) -> tuple[jax.Array, ...]:
    """(logits, temperature, seeds, positions); a third of the rows greedy, and some odd ones."""
    logits = rng.normal(size=(ROWS, VOCAB)).astype(np.float32) * 3
    logits[1] = 2.0  # all equal
    logits[2, [1400, 700, 30]] = 50.0  # three best
    logits[3] = -np.inf
    logits[4, 1499] = np.nan
    logits[5, 3] = np.inf
    logits[6], logits[6, 1300] = -np.inf, -4.0  # one choice
    temperature = np.where(np.arange(ROWS) % 3 == 0, 0.0, rng.uniform(0.1, 2.0, ROWS)).astype(np.float32)
    temperature[[2, 4]] = 0.0
    seeds = rng.integers(0, 2**32, (ROWS, 2), np.uint32)
    return tuple(map(jnp.asarray, (logits, temperature, seeds, np.arange(ROWS, dtype=np.int32) * 7)))


@pytest.mark.parametrize("size", [2, 8])
def test_the_same_tokens(size):
    logits, *others = rows(np.random.default_rng(size))
    expected = np.asarray(sample(logits, *others))
    padding = -VOCAB % (size * 128)
    padded = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    sharded = jax.shard_map(
        partial(sample_sharded, axis_name="tensor"),
        mesh=make_mesh({"tensor": size}),
        in_specs=(P(None, "tensor"), P(), P(), P()),
        out_specs=P("tensor"),  # every device's own, one behind the other
        check_vma=False,
    )
    tokens = np.asarray(jax.jit(sharded)(padded, *others)).reshape(size, ROWS)
    np.testing.assert_array_equal(tokens, np.broadcast_to(expected, tokens.shape))
    assert expected[2] == 30
    assert (expected[[3, 4, 5]] == -1).all()
    assert expected[6] == 1300


def test_parts_must_be_whole_tiles():
    with pytest.raises(ValueError, match="100 logits a device are no whole tiles of 128"):
        sample_sharded(jnp.zeros((1, 100)), *(jnp.zeros(1),) * 3, axis_name="tensor")
