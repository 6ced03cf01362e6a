"""The data axis on fake devices: tokens are the single device's on every replica; routing, aborts, failures, counts."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading

import pytest
from golden_cases import read
from tiny_models import write_model

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import EngineConfig
from jaxinfer.core import FinishReason
from jaxinfer.engine import Engine, Replicas
from jaxinfer.engine.replicas import KNOWN_TOKEN_WORTH, choose
from jaxinfer.metrics import EngineStats, ReplicatedStats
from jaxinfer.sharding.mesh import replica_meshes, resolve_mesh

SETTINGS = {"dtype": "float32", "compile_cache": None, "block_size": 4, "num_blocks": 100, "max_model_len": 256}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def golden():
    return read("qwen3_gqa")[0]


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "model"
    return write_model(path, golden["config"], seed=golden["seed"], with_tokenizer=False)


@pytest.fixture(scope="module")
def llm(folder):
    """One row a replica: the fewest programs."""
    with LLM(str(folder), mesh="data=2", max_num_seqs=1, max_num_batched_tokens=8, **SETTINGS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def nothing_is_left(request):
    yield
    if "llm" in request.fixturenames:
        llm = request.getfixturevalue("llm")
        gc.collect()
        stats = llm.stats()
        assert stats["num_requests_running"] == stats["num_requests_waiting"] == stats["kv_cache_usage_perc"] == 0
        while llm.engine.step():
            pass
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("jaxinfer-replica")]
        llm.reset_prefix_cache()


def ids(outputs) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


def prompt_tokens(llm) -> list[int]:
    return [part["prompt_tokens"] for part in llm.stats()["replicas"]]


def test_tokens_on_every_replica_are_the_single_devices(llm, golden):
    """Replica 0 is the default device without a mesh; the other one has the golden's tokens too, and equal draws."""
    devices = [{device for leaf in engine.runner.weights for device in leaf.devices()} for engine in llm.engine.engines]
    assert [len(each) for each in devices] == [1, 1]
    assert devices[0] != devices[1]
    assert llm.engine.engines[0].runner.programs.mesh is None
    before = prompt_tokens(llm)
    prompt = golden["input_ids"]
    prompts = [{"prompt_token_ids": prompt, "cache_salt": salt} for salt in "abcd"]
    drawn = SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True)
    outputs = llm.generate(prompts, [GREEDY, GREEDY, drawn, drawn])
    assert ids(outputs[:2]) == [golden["greedy_ids"]] * 2
    assert ids(outputs[2:3]) == ids(outputs[3:])
    assert ids(outputs[2:3]) != [golden["greedy_ids"][:12]]
    assert [now - then for now, then in zip(prompt_tokens(llm), before, strict=True)] == [2 * len(prompt)] * 2


def test_siblings_stay_together_and_differ(llm):
    before = [part["generation_tokens"] for part in llm.stats()["replicas"]]
    outputs = llm.generate([[5] * 9], SamplingParams(temperature=1.0, seed=3, n=3, max_tokens=8, ignore_eos=True))
    assert len(set(map(tuple, ids(outputs)))) == 3
    grown = [part["generation_tokens"] for part in llm.stats()["replicas"]]
    assert sorted(now - then for now, then in zip(grown, before, strict=True)) == [0, 24]


def test_a_known_prefix_draws_requests(llm):
    """Though the other replica was given less, and is just as idle."""
    prefix = [number * 7 % 250 for number in range(60)]
    before = prompt_tokens(llm)
    llm.generate([prefix], GREEDY)
    for number in range(3):
        assert llm.generate([[*prefix, number]], GREEDY)[0].num_cached_tokens >= 59
    assert sorted(now - then for now, then in zip(prompt_tokens(llm), before, strict=True)) == [0, 60 + 3 * 61]
    other = llm.generate([{"prompt_token_ids": prefix, "cache_salt": "another"}], GREEDY)
    assert other[0].num_cached_tokens == 0
    assert min(now - then for now, then in zip(prompt_tokens(llm), before, strict=True)) == 60


def test_different_requests_spread(llm):
    rng = random.Random(1)
    prompts = [[rng.randrange(250) for _ in range(rng.randrange(5, 40))] for _ in range(16)]
    before = prompt_tokens(llm)
    llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))
    grown = [now - then for now, then in zip(prompt_tokens(llm), before, strict=True)]
    assert sum(grown) == sum(map(len, prompts))
    assert max(grown) - min(grown) <= 40


def test_where_a_request_goes():
    assert choose([5, 3, 4], [0, 0, 0], [0, 0, 0]) == 1
    assert choose([3, 3, 3], [0, 0, 0], [9, 8, 8]) == 1
    margin = 10 * KNOWN_TOKEN_WORTH
    assert choose([100 + margin - 1, 100], [10, 0], [0, 0]) == 0
    assert choose([100 + margin + 1, 100], [10, 0], [0, 0]) == 1
    assert choose([100, 100, 100], [10, 20, 0], [0, 5, 0]) == 1


def test_a_slow_replica_holds_nobody_up(llm, golden, monkeypatch):
    """While one replica waits for its device the other one answers, and its caller can abort and ask."""
    release, is_held = threading.Event(), threading.Event()
    runner = llm.engine.engines[0].runner
    original = runner.fetch

    def fetch(step):
        is_held.set()
        assert release.wait(60)
        return original(step)

    monkeypatch.setattr(runner, "fetch", fetch)
    try:
        streams = [llm.stream(golden["input_ids"], GREEDY) for _ in range(2)]
        held = llm.engine.engines[0].live_states()[0]
        quick = next(stream for stream in streams if stream._state is not held)
        assert ids([list(quick)[-1]]) == [golden["greedy_ids"]]
        assert is_held.wait(60)
        assert not held.outputs
        assert ids([list(llm.stream(golden["input_ids"], GREEDY))[-1]]) == [golden["greedy_ids"]]
        assert llm.engine.find(held.request.request_id) is held
    finally:
        release.set()
    slow = next(stream for stream in streams if stream._state is held)
    assert ids([list(slow)[-1]]) == [golden["greedy_ids"]]


def test_abort_and_abandon(llm, golden):
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    victims = [llm.stream([number] * 9, long) for number in range(2)]
    assert all(len(engine.live_states()) == 1 for engine in llm.engine.engines)
    neighbour = llm.stream(golden["input_ids"], GREEDY)
    first = next(victims[0])
    thread = threading.Thread(target=llm.abort, args=(first.request_id,))
    thread.start()
    thread.join()
    assert list(victims[0])[-1].outputs[0].finish_reason == FinishReason.ABORT
    assert not llm.abort(first.request_id)
    victims.clear()  # nobody waits for the other one any more
    assert ids([list(neighbour)[-1]]) == [golden["greedy_ids"]]


def test_a_failed_step_touches_its_replica_alone(llm, golden, monkeypatch):
    runner, calls = llm.engine.engines[1].runner, []
    original, before = runner.dispatch, llm.stats()["num_failed_steps"]

    def dispatch(plan):
        calls.append(plan)
        if len(calls) == 3:
            raise RuntimeError("the device said no")
        return original(plan)

    monkeypatch.setattr(runner, "dispatch", dispatch)
    outputs = llm.generate([golden["input_ids"]] * 2, GREEDY)
    reasons = sorted(str(output.outputs[0].finish_reason) for output in outputs)
    assert reasons == ["error", "length"]
    for output in outputs:
        is_lost = output.outputs[0].finish_reason == FinishReason.ERROR
        assert ("the device said no" in (output.error or "")) == is_lost
        assert is_lost or ids([output]) == [golden["greedy_ids"]]
    stats = llm.stats()
    assert stats["num_failed_steps"] - before == 1
    assert stats["num_failed_replicas"] == 0
    assert ids(llm.generate([golden["input_ids"]] * 2, GREEDY)) == [golden["greedy_ids"]] * 2


def test_a_lost_replica_is_not_used_any_more(llm, golden, monkeypatch, caplog):
    """One whose engine cannot even recover: its requests end, all others go to those that are left, if there are."""

    def step():
        raise OSError("the device is gone")

    replicas = llm.engine._replicas
    monkeypatch.setattr(llm.engine.engines[1], "step", step)
    try:
        outputs = llm.generate([golden["input_ids"]] * 2, GREEDY)
        lost = [output.error for output in outputs if output.error]
        assert lost == ["replica 1 has failed: OSError: the device is gone"]
        assert "replica 1 has failed and is not used any more" in caplog.text
        before = prompt_tokens(llm)
        assert ids(llm.generate([golden["input_ids"]] * 4, GREEDY)) == [golden["greedy_ids"]] * 4
        assert prompt_tokens(llm)[1] == before[1]
        assert llm.stats()["num_failed_replicas"] == 1
        replicas[0].error = replicas[1].error
        with pytest.raises(RuntimeError, match="all 2 replicas have failed"):
            llm.generate([golden["input_ids"]], GREEDY)
    finally:
        monkeypatch.undo()
        for replica in replicas:
            replica.error = None
    assert ids(llm.generate([golden["input_ids"]] * 2, GREEDY)) == [golden["greedy_ids"]] * 2


def test_counts_add_up(llm):
    stats = llm.stats()
    parts = stats["replicas"]
    for name in ("num_steps", "prompt_tokens", "generation_tokens", "num_programs", "num_blocks"):
        assert stats[name] == sum(part[name] for part in parts)
    assert (stats["num_blocks"], stats["block_size"], stats["max_model_len"]) == (200, 4, 256)
    assert llm.config.num_blocks == 100  # each
    assert llm.config.mesh == "data=2"
    assert (llm.engine.num_replicas, llm.engine.num_devices) == (2, 2)
    assert "cache 396 tokens on each of 2 replicas" in repr(llm)
    full, half = (
        EngineStats(kv_cache_usage_perc=1.0, num_blocks=30),
        EngineStats(kv_cache_usage_perc=0.5, num_blocks=10),
    )
    assert ReplicatedStats.of([full, half], 0).kv_cache_usage_perc == pytest.approx(35 / 40)


def test_meshes_of_replicas(folder):
    mesh = resolve_mesh("data=2,tensor=4")
    assert mesh is not None
    parts = replica_meshes(mesh)
    assert [dict(part.shape) for part in parts if part] == [{"data": 1, "pipe": 1, "expert": 1, "tensor": 4}] * 2
    assert [device for part in parts if part for device in part.devices.flat] == list(mesh.devices.flat)
    assert replica_meshes(None) == [None]
    with pytest.raises(ValueError, match="an Engine is one replica of data=2"):
        Engine(EngineConfig(model=str(folder), mesh="data=2", compile_cache=None))
    assert isinstance(LLM(str(folder), mesh="data=1", **SETTINGS).engine, Engine)


# -- slow ----------------------------------------------------------------------------------------

MANY = [
    SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True),  # seeds that the engine gives
    SamplingParams(temperature=1.1, seed=5, n=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, top_k=9, top_p=0.9, min_p=0.01, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.0, presence_penalty=0.6, repetition_penalty=1.3, logit_bias={7: 2.0}, max_tokens=12),
    SamplingParams(temperature=0.0, prompt_logprobs=1, logprobs=1, max_tokens=3, ignore_eos=True),
]


def many_prompts() -> list[list[int]]:
    rng = random.Random(2)
    shared = [rng.randrange(250) for _ in range(24)]
    fresh = [[rng.randrange(250) for _ in range(rng.randrange(1, 50))] for _ in range(24)]
    return [[*shared, *prompt] if number % 3 == 0 else prompt for number, prompt in enumerate(fresh)]


@pytest.mark.slow
def test_every_way_to_sample(folder):
    """Two rounds, so that the second one is routed by what the first one left."""
    prompts = many_prompts()
    params = [MANY[number % len(MANY)] for number in range(len(prompts))]
    expected = None
    for mesh in (None, "data=2", "data=2,tensor=2", "data=4,tensor=2"):
        with LLM(str(folder), mesh=mesh, max_num_seqs=4, max_num_batched_tokens=16, **SETTINGS) as llm:
            got = [ids(llm.generate(prompts, params)) for _ in range(2)]
            assert isinstance(llm.engine, Replicas) == (mesh is not None)
            if mesh is not None:
                assert min(prompt_tokens(llm)) > 0
        expected = expected or got
        assert got == expected, mesh


@pytest.mark.slow
def test_interrupted_at_any_moment_it_then_generates_correctly(folder):
    prompts, rng, num_interrupts = many_prompts()[:6], random.Random(0), 0
    with LLM(str(folder), mesh="data=2", max_num_seqs=4, max_num_batched_tokens=16, **SETTINGS) as llm:
        expected = ids(llm.generate(prompts, GREEDY))
        for _ in range(30):
            timer = threading.Timer(rng.random() * 0.06, os.kill, (os.getpid(), signal.SIGINT))
            try:
                timer.start()
                llm.generate(prompts, GREEDY)
                timer.join()
            except KeyboardInterrupt:
                num_interrupts += 1
                timer.join()
            assert llm.stats()["num_requests_running"] == 0
            assert ids(llm.generate(prompts, GREEDY)) == expected
        assert num_interrupts > 10


@pytest.mark.slow
def test_callers_from_many_threads(folder):
    """Streams and whole answers from 16 threads, some dropped half way: every complete one is right."""
    prompts, wrong = many_prompts()[:16], []
    with LLM(str(folder), mesh="data=3", max_num_seqs=4, max_num_batched_tokens=16, **SETTINGS) as llm:
        expected = ids(llm.generate(prompts, GREEDY))

        def call(number: int) -> None:
            rng = random.Random(number)
            for _ in range(8):
                if rng.random() < 0.5:
                    got = ids(llm.generate([prompts[number]], GREEDY))[0]
                else:
                    stream, got = llm.stream(prompts[number], GREEDY), []
                    for output in stream:
                        got = output.outputs[0].token_ids
                        if rng.random() < 0.03:
                            stream.close()
                            break
                if got != expected[number][: len(got)]:
                    wrong.append(number)

        threads = [threading.Thread(target=call, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        gc.collect()
        stats = llm.stats()
        assert stats["num_requests_running"] == stats["num_requests_waiting"] == stats["kv_cache_usage_perc"] == 0
    assert not wrong
