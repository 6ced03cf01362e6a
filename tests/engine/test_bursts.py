"""Several decode steps in one program give the tokens of single steps, whatever happens in their middle."""

from __future__ import annotations

import random

import pytest
from tiny_models import SETTINGS, write_model

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.build import default_decode_steps


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("bursts") / "model", seed=5)


def make_requests() -> list[tuple[list[int], SamplingParams]]:
    """Ends by id, by length and by text; most are sampled by the step, some need the full sampler."""
    rng = random.Random(3)
    kinds = (
        {"temperature": 0.0},
        {},
        {"top_p": 0.8},
        {"stop": ["e", "t"]},
        {},
        {"max_tokens": 5, "presence_penalty": 0.3},
    )
    return [
        (
            [rng.randrange(256) for _ in range(rng.choice([1, 15, 16, 17, 60, 90]))],
            SamplingParams(
                **{"temperature": 0.9, "seed": n, "max_tokens": rng.choice([6, 30, 47, 60]), **kinds[n % 6]}
            ),
        )
        for n in range(10)
    ]


def run(folder, num_aborted: int = 0, **changes) -> tuple[list[tuple[list[int], str, str | None]], dict, int]:
    """(tokens, text, reason) of each request, the stats, and how many bursts ran. The last ones are aborted early."""
    with LLM(str(folder), **{**SETTINGS, **changes}, warmup="full") as llm:
        runner, num_bursts = llm.engine.runner, 0
        original = runner._run_burst

        def counted(*arguments):
            nonlocal num_bursts
            num_bursts += 1
            return original(*arguments)

        runner._run_burst = counted
        requests = make_requests()
        states = [llm.engine.make(*request) for request in requests]
        llm.engine.submit(states)
        while llm.engine.step():
            for state in states[len(states) - num_aborted :]:
                if state.answers[0].request.num_output_tokens > 3:
                    llm.engine.abort(state)
        stats = llm.stats()
        llm.engine._scheduler.check_integrity()
    ends = [state.outputs[-1].outputs[0] for state in states[: len(states) - num_aborted]]
    return [(end.token_ids, end.text, end.finish_reason) for end in ends], stats, num_bursts


@pytest.fixture(scope="module")
def single(folder):
    return run(folder, decode_steps=1, depth=1)[0]


@pytest.mark.parametrize(
    ("depth", "decode_steps", "changes"),
    [
        (2, 4, {}),
        pytest.param(1, 3, {"num_blocks": 17, "max_model_len": 256}, marks=pytest.mark.slow),
        pytest.param(2, 3, {"num_blocks": 17, "max_model_len": 256}, marks=pytest.mark.slow),
        pytest.param(1, 2, {}, marks=pytest.mark.slow),
        pytest.param(3, 5, {"num_aborted": 3}, marks=pytest.mark.slow),
        pytest.param(2, 2, {"num_aborted": 3}, marks=pytest.mark.slow),
    ],
)
def test_bursts_equal_single_steps(folder, single, depth, decode_steps, changes):
    ends, stats, num_bursts = run(folder, decode_steps=decode_steps, depth=depth, **changes)
    assert ends == single[: len(ends)]
    assert num_bursts > 4
    assert stats["num_compiles_while_serving"] == 0
    assert stats["num_preemptions"] > 0 or "num_blocks" not in changes
    assert stats["kv_cache_usage_perc"] == 0.0


@pytest.mark.parametrize(
    ("platform", "gigabytes", "num_devices", "expected"),
    [
        ("gpu", 1.2, 1, 4),
        ("gpu", 16.4, 1, 1),  # 8B: the device takes longer than the host
        ("gpu", 16.4, 2, 4),  # half of it on each, and a host that has two to serve
        ("gpu", 141.0, 8, 1),
        ("tpu", 16.4, 4, 1),
        ("tpu", 1.2, 4, 4),
        ("cpu", 1.2, 2, 1),
    ],
)
def test_bursts_are_for_steps_shorter_than_the_hosts_part(platform, gigabytes, num_devices, expected):
    assert default_decode_steps(platform, int(gigabytes * 1e9), num_devices) == expected
