"""64 mixed requests give the same tokens alone, together, in a tiny pool, in another order, at both depths; and no
program is compiled after warm-up.
"""

from __future__ import annotations

import random
import string

import jax
import pytest
from tiny_models import VOCAB, shrink_pool, write_model

from jaxinfer import LLM, SamplingParams
from jaxinfer.core import RequestOutput

NUM_REQUESTS = 64
LOGPROB_TOLERANCE = 1e-4
NOISE = 2e-5
"""Logits of one model computed in different batches differ by less than this (measured: see the test)."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("tiny") / "model", seed=5)


def make_requests() -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 1,500 tokens, some with common beginnings; every sampling feature."""
    rng = random.Random(1)
    families = [[rng.randrange(256) for _ in range(1500)] for _ in range(3)]
    requests = []
    for number in range(NUM_REQUESTS):
        if number % 3 == 0:
            prompt = rng.choice(families)[: rng.choice([1, 40, 127, 128, 129, 300, 700, 1500])]
        else:
            prompt = [rng.randrange(256) for _ in range(rng.choice([1, 2, 5, 17, 60, 128, 200]))]
        requests.append((prompt, _params(number, rng)))
    return requests


def _params(number: int, rng: random.Random) -> SamplingParams:
    common = {"max_tokens": rng.choice([1, 4, 12, 24]), "ignore_eos": number % 4 != 0}
    seeded = {**common, "temperature": 0.9, "seed": 1000 + number}
    kinds = [
        {**common, "temperature": 0.0, "logprobs": 2},
        {**seeded},
        {**seeded, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {**seeded, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {**common, "temperature": 0.0, "logit_bias": {number % VOCAB: 3.0, 7: -2.0}, "logprobs": 3},
        {**seeded, "stop": list(string.ascii_lowercase[:6]), "bad_words": ["q", "zz"]},
        {**seeded, "logprobs": 5, "min_tokens": 1},
        {**seeded, "allowed_token_ids": list(range(20, 120))},
    ]
    return SamplingParams(**kinds[number % len(kinds)])


def make_llm(folder, **changes) -> LLM:
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "block_size": 128, "num_blocks": 200,
                "max_model_len": 2048, "compile_cache": None, "warmup": "full", "dtype": "float32"}  # fmt: skip
    return LLM(str(folder), **{**settings, **changes})


def run_together(llm: LLM, requests, order=None) -> list[RequestOutput]:
    """All at once, each with its own parameters."""
    order = list(range(len(requests))) if order is None else order
    states = {number: llm.engine.make(*requests[number]) for number in order}
    llm.engine.submit(list(states.values()))
    while llm.engine.step():
        pass
    return [states[number].outputs[-1] for number in range(len(requests))]


@pytest.fixture(scope="module")
def solo(folder) -> list[RequestOutput]:
    """Each request alone, without caching: the truth."""
    with make_llm(folder, enable_prefix_caching=False) as llm:
        return [llm.generate([prompt], params)[0] for prompt, params in make_requests()]


def largest_difference(left: list[RequestOutput], right: list[RequestOutput]) -> float:
    """Asserts equal tokens, texts and ends; the largest difference of any log-probability."""
    worst = 0.0
    for one, other in zip(left, right, strict=True):
        a, b = one.outputs[0], other.outputs[0]
        assert a.token_ids == b.token_ids
        assert (a.text, a.finish_reason, a.stop_reason) == (b.text, b.finish_reason, b.stop_reason)
        for step, same_step in zip(a.logprobs or [], b.logprobs or [], strict=True):
            assert set(step) == set(same_step)
            worst = max([worst, *(abs(step[id_].logprob - same_step[id_].logprob) for id_ in step)])
    return worst


def smallest_margin(outputs: list[RequestOutput]) -> float:
    """Over greedy requests without bias: the gap between the best and the second logit."""
    margins = []
    for output, (_, params) in zip(outputs, make_requests(), strict=True):
        if params.is_greedy and not params.logit_bias:
            for step in output.outputs[0].logprobs or []:
                best, second = sorted((entry.logprob for entry in step.values()), reverse=True)[:2]
                margins.append(best - second)
    assert len(margins) > 50
    return min(margins)


@pytest.mark.parametrize("depth", [1, 2])
def test_together_equals_solo(folder, solo, depth):
    with make_llm(folder, depth=depth) as llm:
        outputs = run_together(llm, make_requests())
        stats = llm.stats()
    noise = largest_difference(solo, outputs)
    assert noise < NOISE < LOGPROB_TOLERANCE
    assert smallest_margin(solo) > 4 * NOISE  # so equal tokens are no luck
    assert stats["prefix_cache_hits"] > 0
    assert stats["num_block_copies"] > 0
    assert stats["num_mixed_steps"] > 0
    assert stats["num_compiles_while_serving"] == 0


@pytest.mark.parametrize("depth", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_tiny_pool_and_any_order_equal_solo(folder, solo, depth):
    requests = make_requests()
    order = list(range(NUM_REQUESTS))
    random.Random(depth).shuffle(order)
    with make_llm(folder, depth=depth) as llm:
        shrink_pool(llm, 21)  # 20 blocks of 128
        outputs = run_together(llm, requests, order)
        stats = llm.stats()
        assert largest_difference(solo, outputs) < LOGPROB_TOLERANCE
        assert stats["num_preemptions"] > 0
        assert stats["prefix_cache_hits"] > 0
        assert stats["num_block_copies"] > 0
        assert stats["num_mixed_steps"] > 0
        assert stats["kv_cache_usage_perc"] == 0.0


def test_nothing_is_compiled_after_warm_up(folder):
    """P6: random traffic, with every compilation counted, eager host operations included."""
    with make_llm(folder, depth=2) as llm:
        shrink_pool(llm, 21)
        requests = make_requests()
        run_together(llm, requests[:4])
        events: list[str] = []

        def note(event: str, duration: float, **_: object) -> None:
            if "compile" in event:
                events.append(event)

        jax.monitoring.register_event_duration_secs_listener(note)
        try:
            outputs = run_together(llm, requests)
            llm.reset_prefix_cache()
            run_together(llm, requests[:8])
            assert events == []
            jax.jit(lambda x: x + 3)(jax.numpy.ones(3)).block_until_ready()
            assert events != []  # the counter counts
        finally:
            jax.monitoring.clear_event_listeners()
        assert len(outputs) == NUM_REQUESTS
        assert llm.stats()["num_compiles_while_serving"] == 0
