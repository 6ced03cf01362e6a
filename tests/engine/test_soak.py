"""Long random traffic: nothing leaks, nothing compiles, every answer is the solo one."""

from __future__ import annotations

import random

import pytest
from content_device import Traffic
from tiny_models import write_model

from jaxinfer import LLM, SamplingParams


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_drafts", [0, 1, 5])
def test_long_traffic_over_the_content_device(depth, num_drafts):
    for seed, policy in enumerate(["fcfs", "priority"] * 3):
        Traffic(1000 + seed, depth, num_drafts, policy=policy, num_blocks=16).run(2000)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
def test_many_tiny_requests_leave_nothing_behind(tmp_path, depth):
    rng = random.Random(depth)
    with LLM(str(write_model(tmp_path / "m")), max_num_seqs=16, num_blocks=40, max_num_batched_tokens=64, depth=depth,
             compile_cache=None, warmup="full") as llm:  # fmt: skip
        engine = llm.engine
        for _ in range(300):
            states = [
                engine.make(
                    [rng.randrange(256) for _ in range(rng.randrange(1, 30))],
                    SamplingParams(temperature=1.0, seed=1, max_tokens=rng.randrange(1, 9), top_k=rng.choice([0, 5])),
                )
                for _ in range(20)
            ]
            engine.submit(states)
            while engine.step():
                if rng.random() < 0.05:
                    engine.abort(rng.choice(states))
            assert all(state.is_finished for state in states)
        assert not engine._live
        assert not engine._in_flight
        stats = llm.stats()
        assert stats["kv_cache_usage_perc"] == 0.0
        assert stats["num_compiles_while_serving"] == 0
        engine._scheduler.check_integrity()
