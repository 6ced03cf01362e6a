"""A whole model on the TPU's kernels, in the TPU interpreter: plans, caches and layers fit together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.batch import AttentionMetadata
from jaxinfer.config import Kernels, ModelConfig, RopeConfig
from jaxinfer.models import DenseModel, build_model

BLOCK = 16
BLOCKS_PER_ROW = 3
CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=64,
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e4),
    tie_word_embeddings=True,
    has_qk_norm=True,
)


def random_model(kernels: Kernels) -> DenseModel:
    graph, state = nnx.split(build_model(CONFIG, "bfloat16", kernels))
    leaves, tree = jax.tree.flatten(state)
    rng = np.random.default_rng(1)
    leaves = [jnp.asarray(0.2 * rng.standard_normal(leaf.shape), leaf.dtype) for leaf in leaves]
    return nnx.merge(graph, jax.tree.unflatten(tree, leaves))


def metadata(query_lens: list[int], seq_lens: list[int], num_tokens: int) -> AttentionMetadata:
    """Rows over blocks 1, 2, ... and one row of padding."""
    starts = np.cumsum([0, *query_lens])
    positions, slots = np.zeros((2, num_tokens), np.int32)
    tables = 1 + np.arange((len(seq_lens) + 1) * BLOCKS_PER_ROW).reshape(-1, BLOCKS_PER_ROW)
    for row, (new, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        here = np.arange(length - new, length)
        where = slice(starts[row], starts[row + 1])
        positions[where], slots[where] = here, tables[row, here // BLOCK] * BLOCK + here % BLOCK
    return AttentionMetadata(
        positions=jnp.asarray(positions),
        slot_mapping=jnp.asarray(slots),
        block_tables=jnp.asarray(tables, jnp.int32),
        seq_lens=jnp.asarray([*seq_lens, 0], jnp.int32),
        query_start_loc=jnp.asarray([*starts, starts[-1]], jnp.int32),
    )


def run(kernels: Kernels, meta: AttentionMetadata, *, is_decode: bool) -> tuple[jax.Array, list]:
    model, rng = random_model(kernels), np.random.default_rng(2)
    shape = (meta.block_tables.size + 1, CONFIG.num_kv_heads, BLOCK, CONFIG.head_dim)
    caches = [tuple(jnp.asarray(rng.standard_normal((2, *shape)), jnp.bfloat16)) for _ in range(CONFIG.num_layers)]
    ids = jnp.asarray(rng.integers(0, CONFIG.vocab_size, meta.positions.shape), jnp.int32)
    return jax.jit(lambda *step: model(*step, is_decode=is_decode))(ids, meta, caches)


@pytest.mark.parametrize("is_decode", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["mixed", "decode"])
def test_matches_the_reference(is_decode: bool) -> None:
    query_lens, num_tokens = ([1, 1, 1], 4) if is_decode else ([1, 1, 9, 5], 18)
    meta = metadata(query_lens, [20, 7, 40, 30][: len(query_lens)], num_tokens)
    want, want_caches = run(Kernels(), meta, is_decode=is_decode)
    with pltpu.force_tpu_interpret_mode():
        got, got_caches = run(Kernels("mosaic_tpu", "mosaic_tpu"), meta, is_decode=is_decode)
    count = sum(query_lens)
    np.testing.assert_allclose(*(np.asarray(x[:count], np.float32) for x in (got, want)), atol=0.02)
    for a, b in zip(jax.tree.leaves(got_caches), jax.tree.leaves(want_caches), strict=True):
        np.testing.assert_allclose(*(np.asarray(x[1:], np.float32) for x in (a, b)), atol=0.02)
