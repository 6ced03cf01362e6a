"""Every architecture against transformers: logits of a forward pass, and greedy generation through the engine."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from golden_weights import make_state_dict, state_dict_sha256
from tiny_models import write_model

from jaxinfer import LLM, SamplingParams
from jaxinfer.batch import AttentionMetadata
from jaxinfer.config import EngineConfig
from jaxinfer.engine.build import load_weights
from jaxinfer.layers import inverse_frequencies
from jaxinfer.loaders import open_checkpoint
from jaxinfer.models import build_model, parse_config, supported_architectures

TINY = Path(__file__).parents[1] / "goldens" / "tiny"
TOLERANCE = 1e-4  # float32 against float64 differs by 2e-5 at most; the least wrong setting tried, by 0.02


def read(name: str) -> tuple[dict, dict[str, np.ndarray]]:
    with np.load(TINY / f"{name}.npz") as arrays:
        return json.loads((TINY / f"{name}.json").read_text()), dict(arrays)


def supported() -> list[str]:
    cases = [path.stem for path in sorted(TINY.glob("*.json"))]
    return [
        name
        for name in cases
        if read(name)[0]["config"]["architectures"][0] in supported_architectures() and "yarn" not in name
    ]


def forward(folder: Path, token_ids: list[int], block_size: int = 16) -> np.ndarray:
    """Logits of all positions, float32 [T, V], through the paged cache."""
    checkpoint = open_checkpoint(str(folder))
    config = parse_config(checkpoint.config)
    model = build_model(config, "float32")
    weights = load_weights(EngineConfig(), checkpoint, config, model, jax.devices()[0])
    graph, state = nnx.split(model)
    tree = jax.tree.structure(state)
    length = len(token_ids)
    blocks = -(-length // block_size)
    page = jnp.full((blocks + 1, config.num_kv_heads, block_size, config.head_dim), jnp.nan)
    positions = jnp.arange(length, dtype=jnp.int32)
    meta = AttentionMetadata(
        positions=positions,
        slot_mapping=positions + block_size,
        block_tables=jnp.arange(1, blocks + 1, dtype=jnp.int32)[None],
        seq_lens=jnp.array([length], jnp.int32),
        query_start_loc=jnp.array([0, length], jnp.int32),
    )

    @jax.jit
    def run(weights, caches):
        bound = nnx.merge(graph, jax.tree.unflatten(tree, weights))
        hidden, _ = bound(jnp.array(token_ids, jnp.int32), meta, caches)
        return bound.logits(hidden)

    return np.asarray(run(weights, [(page, page)] * config.num_layers))


@pytest.mark.parametrize("name", supported())
def test_logits_equal_transformers(name, tmp_path):
    golden, arrays = read(name)
    state = make_state_dict(golden["config"], golden["seed"])
    assert state_dict_sha256(state) == golden["state_dict_sha256"]
    folder = write_model(tmp_path / name, golden["config"], state=state, with_tokenizer=False)
    np.testing.assert_allclose(forward(folder, golden["input_ids"]), arrays["logits"], atol=TOLERANCE, rtol=0)
    config = parse_config(golden["config"])
    frequencies = inverse_frequencies(config.rope, config.head_dim)
    np.testing.assert_allclose(frequencies, arrays["inv_freq"], rtol=2e-7)  # a unit in the last place
    assert parse_config(golden["config_transformers5"]) == config


@pytest.mark.parametrize("name", supported())
def test_greedy_tokens_equal_transformers(name, tmp_path):
    golden, _ = read(name)
    folder = write_model(tmp_path / name, golden["config"], seed=golden["seed"], with_tokenizer=False)
    with LLM(str(folder), max_num_seqs=2, max_num_batched_tokens=16, compile_cache=None) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        output = llm.generate(golden["input_ids"], params)[0]
    assert output.outputs[0].token_ids == golden["greedy_ids"]
    assert golden["min_top2_gap"] >= 1e-3


def test_every_family_has_a_golden():
    with_golden = {read(path.stem)[0]["config"]["architectures"][0] for path in TINY.glob("*.json")}
    assert set(supported_architectures()) <= with_golden
