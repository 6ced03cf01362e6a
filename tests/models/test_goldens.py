"""Every architecture against transformers: logits of a forward pass, and greedy generation through the engine."""

from __future__ import annotations

import numpy as np
import pytest
from golden_cases import TINY, TOLERANCE, forward, read, supported
from golden_weights import make_state_dict, state_dict_sha256
from tiny_models import write_model

from jaxinfer import LLM, SamplingParams
from jaxinfer.layers import inverse_frequencies
from jaxinfer.models import parse_config, supported_architectures


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
    with LLM(str(folder), dtype="float32", max_num_seqs=2, max_num_batched_tokens=16, compile_cache=None) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        output = llm.generate(golden["input_ids"], params)[0]
    assert output.outputs[0].token_ids == golden["greedy_ids"]
    assert golden["min_top2_gap"] >= 1e-3


def test_every_family_has_a_golden():
    with_golden = {read(path.stem)[0]["config"]["architectures"][0] for path in TINY.glob("*.json")}
    assert set(supported_architectures()) <= with_golden


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.3), ("float16", 0.04)])
def test_narrow_types_stay_near(tmp_path, dtype, tolerance):
    """Logits up to 5 with 8 and 11 bits of mantissa, over two layers."""
    golden, arrays = read("qwen3_gqa")
    folder = write_model(tmp_path / "m", golden["config"], seed=golden["seed"], with_tokenizer=False)
    logits = forward(folder, golden["input_ids"], dtype=dtype)
    assert 1e-4 < np.abs(logits - arrays["logits"]).max() < tolerance
