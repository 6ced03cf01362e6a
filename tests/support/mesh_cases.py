"""Requests that use every way to sample, for comparing a mesh with a single device."""

from __future__ import annotations

import pytest

from jaxinfer import LLM, SamplingParams

SETTINGS = {"dtype": "float32", "max_num_seqs": 2, "max_num_batched_tokens": 16, "compile_cache": None}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PARAMS = [
    SamplingParams(temperature=0.8, seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.3, seed=2, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, top_k=9, top_p=0.9, min_p=0.01, logprobs=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, top_k=9, top_p=0.9, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, presence_penalty=0.6, repetition_penalty=1.3, logit_bias={7: 2.0}, max_tokens=12),
    SamplingParams(temperature=0.0, prompt_logprobs=2, logprobs=0, max_tokens=2, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=4, allowed_token_ids=[3, 140, 249], max_tokens=6, ignore_eos=True),
]


def run(folder, mesh, prompts, params, **settings) -> list[tuple]:
    """(tokens, log-probabilities, those of the prompt) of each answer."""
    with LLM(str(folder), mesh=mesh, **{**SETTINGS, **settings}) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats()["num_failed_steps"] == 0
    answers = [output.outputs[0] for output in outputs]
    return [
        (answer.token_ids, answer.logprobs, out.prompt_logprobs) for answer, out in zip(answers, outputs, strict=True)
    ]


def compare_logprobs(one, other, tolerance=1e-5):
    """Of one answer; None where it has none."""
    assert (one is None) == (other is None)
    for first, second in zip(one or (), other or (), strict=True):
        assert (first is None) == (second is None)
        if first is not None:
            assert list(first) == list(second)
            for token in first:
                assert first[token].logprob == pytest.approx(second[token].logprob, abs=tolerance)
                assert first[token].rank == second[token].rank
