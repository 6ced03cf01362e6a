"""Failures that other engines have had (groups A to H), as far as no other test names them; each by its id."""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pytest
from golden_cases import forward
from tiny_models import EOS, ODD_BUDGET, SETTINGS, shrink_pool, write_model, write_tokenizer

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import RopeConfig
from jaxinfer.core import FinishReason
from jaxinfer.layers import inverse_frequencies

GROUPS = {
    "A": (2, 3, 6, 8),
    "B": (1, 2, 4, 7, 8, 10, 11, 12, 14, 16, 18),
    "C": (1, 3, 5, 7),
    "D": (1, 2, 3, 5, 8),
    "E": (3,),
    "F": (1, 3, 7, 9),
    "G": (1, 5),
    "H": (1, 3, 8),
}
CASES = [f"{group}{number}" for group, numbers in GROUPS.items() for number in numbers]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("cases") / "model", seed=8)


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), **SETTINGS) as llm:
        yield llm


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(256) for _ in range(length)]


def greedy(**fields) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, **fields})


def ids(output) -> list[int]:
    return output.outputs[0].token_ids


def test_every_case_is_named_by_a_test():
    """Each id stands in the text of some test, its list here aside."""
    paths = list(Path(__file__).parent.rglob("test_*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in paths)
    assert [case for case in CASES if not re.search(rf"\b{case}\b", text)] == []


def test_end_ids_are_the_union_of_three_sources(tmp_path):
    """A8: config, generation config and tokenizer say different ends; each one ends."""
    folder = write_model(tmp_path / "m", eos_token_id=11)
    (folder / "generation_config.json").write_text('{"eos_token_id": [12, 13]}')
    write_tokenizer(folder)
    with LLM(str(folder), **SETTINGS) as llm:
        for end in (11, 12, 13, EOS):
            output = llm.generate([prompt(5)], SamplingParams(temperature=0.0, logit_bias={end: 1000.0}))[0]
            assert (ids(output), output.outputs[0].finish_reason) == ([end], FinishReason.STOP)
        ignoring = greedy(ignore_eos=True, logit_bias={11: 1000.0}, max_tokens=3)
        assert ids(llm.generate([prompt(5)], ignoring)[0]) == [11, 11, 11]
        late = SamplingParams(temperature=0.0, min_tokens=3, max_tokens=9, logit_bias={11: 1000.0})
        output = llm.generate([prompt(5)], late)[0]
        assert 11 not in ids(output)[:3]
        assert ids(output)[3:] == [11]


def test_seeded_beside_unseeded(llm):
    """B10: seed 42 beside a request without a seed, repeated."""
    seeded, free = SamplingParams(seed=42, ignore_eos=True), SamplingParams(ignore_eos=True)
    answers = [llm.generate([prompt(7), prompt(7)], [seeded, free]) for _ in range(3)]
    assert len({tuple(ids(pair[0])) for pair in answers}) == 1
    assert len({tuple(ids(pair[1])) for pair in answers}) > 1


@pytest.mark.parametrize("bad", [260, 261, -1, 2**63])
def test_bad_ids_leave_a_neighbour_alone(llm, bad):
    """B12: in prompt, logit_bias and stop_token_ids, while another request runs."""
    expected = ids(llm.generate([prompt(20)], greedy())[0])
    stream = llm.stream(prompt(20), greedy())
    next(stream)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        llm.generate([[1, bad]], greedy())
    for field, value in (("logit_bias", {bad: 1.0}), ("stop_token_ids", [bad]), ("allowed_token_ids", [bad])):
        with pytest.raises(ValueError, match=field):
            llm.generate([[1]], greedy(**{field: value}))
    assert ids(list(stream)[-1]) == expected


def test_a_token_of_rank_fifty_is_in_its_logprobs(llm):
    """B14: the sampled token is always there, whatever its rank."""
    output = llm.generate([prompt(9)], SamplingParams(temperature=30.0, seed=3, logprobs=2, max_tokens=40))[0]
    ranks = [step[token].rank for token, step in zip(ids(output), output.outputs[0].logprobs, strict=True)]
    assert max(ranks) > 50
    total = sum(step[token].logprob for token, step in zip(ids(output), output.outputs[0].logprobs, strict=True))
    assert output.outputs[0].cumulative_logprob == pytest.approx(total)


@pytest.mark.parametrize(
    "fields",
    [{"temperature": 0.0}, {"n": 3, "seed": 4}, {"presence_penalty": 1.0, "frequency_penalty": 0.5, "seed": 9}],
    ids=["greedy", "n", "penalties"],
)
def test_two_requests_outgrow_the_pool(folder, fields):
    """C3: two 34-token prompts, 35 outputs, 7 blocks of 16: as with a large pool."""
    params = SamplingParams(**{"temperature": 1.0, "max_tokens": 35, "ignore_eos": True, **fields})
    results = []
    for num_blocks in (8, 400):
        with LLM(str(folder), **SETTINGS) as llm:
            shrink_pool(llm, num_blocks)
            outputs = llm.generate([prompt(34, 1), prompt(34, 2)], params)
            results.append([[answer.token_ids for answer in output.outputs] for output in outputs])
            assert (llm.stats()["num_preemptions"] > 0) == (num_blocks == 8)
    assert results[0] == results[1]


def test_cancel_after_every_chunk(folder):
    """C5: one terminal event, no token after it, blocks freed."""
    with LLM(str(folder), **ODD_BUDGET, depth=2) as llm:
        for steps in range(12):
            state = llm.engine.make(prompt(200, steps), greedy(), is_streaming=True)
            llm.engine.submit([state])
            for _ in range(steps):
                llm.engine.step()
            before = state.request.num_output_tokens
            llm.engine.abort(state)
            llm.engine.abort(state)
            while llm.engine.step():
                pass
            assert [output.finished for output in state.outputs].count(True) == 1
            assert state.outputs[-1].outputs[0].finish_reason == FinishReason.ABORT
            assert state.request.num_output_tokens == before
            assert llm.stats()["kv_cache_usage_perc"] == 0.0


def test_repeated_prompt_under_preemption_schedules_its_suffix_only(folder):
    """D2: 465 tokens, blocks of 256: 464 cached; and the same answer in a pool where requests are preempted."""
    settings = {**SETTINGS, "block_size": 256, "num_blocks": 30}
    with LLM(str(folder), **settings) as llm:
        first = llm.generate([prompt(465)], greedy())[0]
        again = llm.generate([prompt(465)], greedy())[0]
        assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 464)
    with LLM(str(folder), **settings) as llm:
        shrink_pool(llm, 5)
        many = llm.generate([prompt(465)] * 4, greedy(max_tokens=60))
        assert llm.stats()["num_preemptions"] > 0
    assert ids(first) == ids(again)
    assert {tuple(ids(output)[:12]) for output in many} == {tuple(ids(first))}


def test_shared_prefixes_in_one_step_with_unaligned_chunks(folder):
    """D3: both as alone."""
    prompts = [prompt(100) + prompt(40, 1), prompt(100) + prompt(33, 2)]
    with LLM(str(folder), **SETTINGS, enable_prefix_caching=False) as llm:
        solo = [ids(llm.generate([one], greedy())[0]) for one in prompts]
    with LLM(str(folder), **ODD_BUDGET) as llm:
        assert [ids(output) for output in llm.generate(prompts, greedy())] == solo


def test_evicted_prefix_is_a_miss_with_the_right_output(folder):
    """D8: fill with A, evict it through B, send A again."""
    with LLM(str(folder), **SETTINGS) as llm:
        shrink_pool(llm, 12)
        first = llm.generate([prompt(120, 1)], greedy())[0]
        llm.generate([prompt(160, 2)], greedy(max_tokens=9))
        again = llm.generate([prompt(120, 1)], greedy())[0]
    assert again.num_cached_tokens < 20
    assert ids(again) == ids(first)


@pytest.mark.slow  # 16 and 128 are the sizes of most fast tests
@pytest.mark.parametrize("block_size", [16, 96, 192, 256])
def test_block_sizes_through_the_engine(folder, llm, block_size):
    """F7."""
    prompts = [prompt(length, length) for length in (1, 95, 97, 200)]
    expected = [ids(output) for output in llm.generate(prompts, greedy())]
    with LLM(str(folder), **{**SETTINGS, "block_size": block_size, "num_blocks": 40, "max_model_len": 400}) as other:
        assert [ids(output) for output in other.generate(prompts, greedy())] == expected


def test_decode_equals_full_recompute_step_by_step(folder, llm):
    """F9: 64 steps; the log-probability of every token against one pass over the whole sequence."""
    output = llm.generate([prompt(30)], greedy(max_tokens=64, logprobs=0))[0]
    logits = forward(folder, [*prompt(30), *ids(output)]).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    for step, (token, entries) in enumerate(zip(ids(output), output.outputs[0].logprobs, strict=True)):
        row = logprobs[29 + step]
        assert token == row.argmax()
        assert entries[token].logprob == pytest.approx(row[token], abs=1e-4)


def test_llama3_frequencies_far_out():
    """G1: the table of Llama 3.1 8B (from its published parameters), and angles at position 20,000."""
    rope = RopeConfig(theta=500000.0, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                      original_max_position=8192)  # fmt: skip
    table = inverse_frequencies(rope, 128).astype(np.float64)
    exact = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    wavelength = 2 * np.pi / exact
    blend = np.clip((8192 / wavelength - 1) / 3, 0, 1)
    wanted = np.where(
        wavelength < 2048, exact, np.where(wavelength > 8192, exact / 8, (1 - blend) * exact / 8 + blend * exact)
    )
    np.testing.assert_allclose(table, wanted, rtol=5e-7)
    assert np.abs(np.cos(20_000 * table) - np.cos(20_000 * wanted)).max() < 2e-3


def test_batched_decode_of_unequal_lengths_equals_solo(llm):
    """G5."""
    prompts = [prompt(length, length) for length in (1, 3, 17, 64, 130, 250)]
    solo = [ids(llm.generate([one], greedy(max_tokens=20))[0]) for one in prompts]
    llm.reset_prefix_cache()
    assert [ids(output) for output in llm.generate(prompts, greedy(max_tokens=20))] == solo
