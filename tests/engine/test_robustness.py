"""Interrupts, abandoned and interleaved streams, aborts from other threads, failed steps, broken rows."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading

import jax.numpy as jnp
import pytest
from tiny_models import SETTINGS, write_model

from jaxinfer import LLM, SamplingParams
from jaxinfer.core import FinishReason

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("robust") / "model", seed=3)
    with LLM(str(folder), **SETTINGS, warmup="full", depth=2) as llm:
        yield llm


@pytest.fixture(autouse=True)
def pool_returns_to_baseline(llm):
    yield
    gc.collect()
    stats = llm.stats()
    assert stats["kv_cache_usage_perc"] == 0.0
    assert stats["num_requests_running"] == stats["num_requests_waiting"] == 0
    llm.engine._scheduler.check_integrity()


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(256) for _ in range(rng.randrange(1, 90))] for _ in range(count)]


def token_ids(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_interrupted_at_any_moment_it_then_generates_correctly(llm):
    """SIGINT at 50 random moments, in and between steps; each time the next answers are right."""
    expected = token_ids(llm.generate(prompts(5), GREEDY))
    rng = random.Random(0)
    num_interrupts = 0
    for _ in range(50):
        timer = threading.Timer(rng.random() * 0.08, os.kill, (os.getpid(), signal.SIGINT))
        try:
            timer.start()
            llm.generate(prompts(5), GREEDY)
            timer.join()  # it may come just after the last step
        except KeyboardInterrupt:
            num_interrupts += 1
            timer.join()
        assert llm.stats()["num_requests_running"] == 0
        assert token_ids(llm.generate(prompts(5), GREEDY)) == expected
    assert num_interrupts > 25


def test_abandoned_stream_returns_its_blocks(llm):
    stream = llm.stream(prompts(1)[0], GREEDY)
    next(stream)
    assert llm.stats()["num_requests_running"] == 1
    del stream
    gc.collect()
    assert llm.stats()["num_requests_running"] == 0
    with_close = llm.stream(prompts(1)[0], GREEDY)
    next(with_close)
    with_close.close()
    assert llm.stats()["kv_cache_usage_perc"] == 0.0
    llm.stream(prompts(1)[0], GREEDY)  # never read at all
    gc.collect()
    assert llm.stats()["num_requests_waiting"] == 0


def test_interleaved_streams(llm):
    expected = token_ids(llm.generate(prompts(2, 1), GREEDY))
    streams = [llm.stream(prompt, GREEDY) for prompt in prompts(2, 1)]
    last = [None, None]
    for one, other in zip(*streams, strict=True):
        last = [one, other]
    assert token_ids(last) == expected


def test_streams_from_threads(llm):
    wanted = prompts(12, 2)
    expected = token_ids(llm.generate(wanted, GREEDY))
    got: dict[int, list[int]] = {}

    def read(number: int) -> None:
        for output in llm.stream(wanted[number], GREEDY):
            got[number] = output.outputs[0].token_ids

    threads = [threading.Thread(target=read, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[number] for number in range(12)] == expected


def test_abort_from_another_thread(llm):
    """One terminal event, no token after it, and the neighbour is untouched."""
    expected = token_ids(llm.generate(prompts(1, 4), GREEDY))
    long = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    victim, neighbour = llm.stream(prompts(1, 3)[0], long), llm.stream(prompts(1, 4)[0], GREEDY)
    first = next(victim)
    thread = threading.Thread(target=llm.abort, args=(first.request_id,))
    thread.start()
    thread.join()
    rest = list(victim)
    assert [output.finished for output in rest].count(True) == 1
    assert rest[-1].finished
    assert rest[-1].outputs[0].finish_reason == FinishReason.ABORT
    assert token_ids([list(neighbour)[-1]]) == expected
    assert not llm.abort(first.request_id)
    assert not llm.abort("nobody")


def test_failed_step_ends_its_requests_and_the_engine_goes_on(llm, monkeypatch):
    expected = token_ids(llm.generate(prompts(3, 5), GREEDY))
    runner = llm.engine.runner
    original, calls = runner.dispatch, []

    def dispatch(plan):
        calls.append(plan)
        if len(calls) == 4:
            runner.caches[0][0].delete()  # what a device error half way leaves behind
            raise RuntimeError("the device said no")
        return original(plan)

    monkeypatch.setattr(runner, "dispatch", dispatch)
    outputs = llm.generate(prompts(3, 5), GREEDY)
    assert all(output.outputs[0].finish_reason == FinishReason.ERROR for output in outputs)
    assert all("the device said no" in (output.error or "") for output in outputs)
    assert all(output.outputs[0].token_ids == want[:3][: len(output.outputs[0].token_ids)]
               for output, want in zip(outputs, expected, strict=True))  # fmt: skip
    monkeypatch.undo()
    assert llm.stats()["num_failed_steps"] == 1
    assert token_ids(llm.generate(prompts(3, 5), GREEDY)) == expected


def test_a_row_without_a_choice_ends_with_error_and_is_not_cached(llm):
    """All logits -inf for one row: it fails alone, nothing of it is reused, its neighbours go on."""
    wanted = prompts(2, 6)
    expected = token_ids(llm.generate(wanted, GREEDY))
    llm.reset_prefix_cache()
    never = SamplingParams(temperature=0.0, max_tokens=8, allowed_token_ids=[5], logit_bias={5: -1e9})
    states = [
        llm.engine.make(wanted[0], GREEDY),
        llm.engine.make(list(range(60)), never),
        llm.engine.make(wanted[1], GREEDY),
    ]
    llm.engine.submit(states)
    features = llm.engine.runner
    original = features.dispatch

    def poison(plan):
        step = original(plan)
        rows = [row for row in plan.rows if row.request is states[1].request and row.samples]
        if rows:
            where = plan.rows.index(rows[0])
            step.output = type(step.output)(step.output.tokens.at[where].set(jnp.int32(-1)), step.output.logprobs)
        return step

    features.dispatch = poison
    try:
        while llm.engine.step():
            pass
    finally:
        features.dispatch = original
    last = [state.outputs[-1] for state in states]
    assert last[1].outputs[0].finish_reason == FinishReason.ERROR
    assert "no token could be chosen" in last[1].error
    assert token_ids([last[0], last[2]]) == expected
    again = llm.generate([list(range(60))], GREEDY)[0]
    assert again.num_cached_tokens == 0


def test_everything_is_validated_before_anything_runs(llm):
    before = llm.stats()["num_steps"]
    with pytest.raises(ValueError, match=r"prompt 2: .*token id 999 is outside the vocabulary of 260"):
        llm.generate([[1], [2], [999], [3]], GREEDY)
    assert llm.stats()["num_steps"] == before


def test_many_biased_requests_under_churn(llm):
    """B18: 200 requests, each biased to its own token, with random aborts: every output is its own token only."""
    rng = random.Random(7)
    states = []
    for number in range(200):
        token = number % 250
        params = SamplingParams(temperature=1.0, seed=number, max_tokens=6, logit_bias={token: 1000.0}, ignore_eos=True)
        states.append((token, llm.engine.make([number % 200, 3, 4], params)))
    llm.engine.submit([state for _, state in states])
    while llm.engine.step():
        if rng.random() < 0.2:
            llm.engine.abort(rng.choice(states)[1])
    for token, state in states:
        assert set(state.request.output_token_ids) <= {token}
        assert state.request.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
