"""Long random traffic: nothing leaks, nothing compiles, every answer is the solo one."""

from __future__ import annotations

import gc
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
    """50,000 requests a depth: half an hour's worth on an accelerator."""
    rng = random.Random(depth)
    model = write_model(tmp_path / "m", num_hidden_layers=1)
    with LLM(str(model), max_num_seqs=32, num_blocks=200, block_size=16, max_num_batched_tokens=128, depth=depth,
             max_model_len=64, compile_cache=None, warmup="full") as llm:  # fmt: skip
        engine = llm.engine
        objects = []
        for number in range(250):
            states = [
                engine.make(
                    [rng.randrange(256) for _ in range(rng.randrange(1, 8))],
                    SamplingParams(
                        temperature=1.0, seed=1, max_tokens=rng.choice([1, 1, 2, 4]), top_k=rng.choice([0, 0, 5])
                    ),
                )
                for _ in range(200)
            ]
            engine.submit(states)
            while engine.step():
                if rng.random() < 0.05:
                    engine.abort(rng.choice(states))
            assert all(state.is_finished for state in states)
            if number % 50 == 49:
                del states
                gc.collect()
                objects.append(len(gc.get_objects()))
        assert max(objects[1:]) < objects[1] + 2000, f"live objects grow: {objects}"
        assert not engine._live
        assert not engine._in_flight
        stats = llm.stats()
        assert stats["kv_cache_usage_perc"] == 0.0
        assert stats["num_compiles_while_serving"] == 0
        engine._scheduler.check_integrity()
