"""Workloads: the baselines' one, traces, arrivals, warm-up."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from random import Random

import pytest

from jaxinfer.metrics.floor import Limits, find_floor
from jaxinfer.metrics.roofline import Precision, Roof
from jaxinfer.metrics.shapes import SHAPES
from jaxinfer.metrics.workload import (
    MAX_TOKEN_ID,
    Job,
    check_jobs,
    draw_arrivals,
    draw_fixed,
    draw_nano,
    draw_trace,
    draw_warm_up,
    read_trace,
)


def test_nano_bench_is_the_baselines():
    """Drawn as nano-vllm's bench.py draws: a prompt's length before its ids, all prompts before all output lengths."""
    jobs = draw_nano(151_936)
    assert sum(job.prompt_len for job in jobs) == 142_827
    assert sum(job.output_len for job in jobs) == 133_966
    rng = Random(0)
    first = rng.randint(100, 1024)
    assert jobs[0].prompt_token_ids == [rng.randint(0, 10_000) for _ in range(first)]
    assert {job.arrival for job in jobs} == {0.0}


def test_nano_bench_of_a_small_vocabulary():
    small, large = draw_nano(260, 3), draw_nano(151_936, 3)
    assert [job.prompt_token_ids for job in small] == [[id_ % 260 for id_ in job.prompt_token_ids] for job in large]


def test_fixed_is_drawn_from_the_seed():
    jobs = draw_fixed(300, 3, 5, 7, seed=1)
    assert jobs == draw_fixed(300, 3, 5, 7, seed=1) != draw_fixed(300, 3, 5, 7, seed=2)
    assert [(job.prompt_len, job.output_len) for job in jobs] == [(5, 7)] * 3
    assert all(0 <= id_ < 300 for job in jobs for id_ in job.prompt_token_ids)
    assert max(id_ for job in draw_fixed(10**6, 1, 5000, 1) for id_ in job.prompt_token_ids) < MAX_TOKEN_ID


def test_arrivals_are_a_poisson_process():
    jobs = draw_arrivals([Job([1], 1)] * 4000, rate=50.0, seed=3)
    assert jobs == draw_arrivals([Job([1], 1)] * 4000, rate=50.0, seed=3)
    moments = [job.arrival for job in jobs]
    gaps = [after - before for before, after in itertools.pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    assert moments[0] == 0.0
    assert min(gaps) >= 0
    assert mean == pytest.approx(1 / 50, rel=0.05)  # its deviation is 1.6%, the seed is fixed
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.1)


def test_an_infinite_rate_is_all_at_once():
    assert {job.arrival for job in draw_arrivals([Job([1], 1)] * 5, math.inf)} == {0.0}


def test_warm_up_runs_every_smaller_batch_with_other_prompts():
    jobs = draw_nano(151_936)
    warm = draw_warm_up(jobs, 151_936, max_num_seqs=256, max_num_batched_tokens=4096)
    assert sorted(job.prompt_len for job in warm) == sorted(job.prompt_len for job in jobs)
    assert not {tuple(job.prompt_token_ids[:16]) for job in warm} & {tuple(job.prompt_token_ids[:16]) for job in jobs}
    roof, limits = Roof(1.0, 1.0, "data sheet"), Limits(max_num_seqs=256, max_num_batched_tokens=4096)
    records = find_floor(warm, SHAPES["0.6b"], roof, limits, Precision()).records
    rows = Counter(Counter(moment for record in records for moment, _ in record.events).values())
    assert all(rows[1 << power] >= 2 for power in range(9)), rows


def test_warm_up_keeps_to_what_the_engine_holds():
    """No longer answers than asked for; the longest prompts, as many as run at once or fill a step."""
    jobs = [Job([0] * length, 1) for length in (3, 9, 5)]

    def sizes(rows, budget):
        warm = draw_warm_up(jobs, 10, max_num_seqs=rows, max_num_batched_tokens=budget)
        return [(job.prompt_len, job.output_len) for job in warm]

    assert sizes(2, 8) == [(9, 1), (5, 1)]
    assert sizes(1, 16) == [(9, 1), (5, 1), (3, 1)]
    assert sizes(8, 1) == [(9, 1), (5, 1), (3, 1)]
    assert draw_warm_up([], 10, max_num_seqs=2, max_num_batched_tokens=8) == []


# -- traces --------------------------------------------------------------------------------------


def write(tmp_path, *lines) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def test_a_trace(tmp_path):
    name = write(
        tmp_path,
        {"input_len": 3, "output_len": 2, "arrival": 5},
        "",
        {"prompt_len": 4, "output_len": 1, "arrival": 4.5},
        {"prompt_token_ids": [7, 8], "output_len": 9, "arrival": 6},
    )
    jobs = draw_trace(read_trace(name), 50, seed=2)
    assert [(job.prompt_len, job.output_len, job.arrival) for job in jobs] == [(3, 2, 0.5), (4, 1, 0.0), (2, 9, 1.5)]
    assert jobs[2].prompt_token_ids == [7, 8]
    assert jobs == draw_trace(read_trace(name), 50, seed=2)


def test_a_trace_without_arrivals(tmp_path):
    entries = read_trace(write(tmp_path, {"input_len": 3, "output_len": 2}))
    assert entries[0].arrival is None
    assert draw_trace(entries, 50)[0].arrival == 0.0


GOOD = {"input_len": 3, "output_len": 2}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no requests"),
        (["{"], "line 1: "),
        ([GOOD, "[1]"], "line 2: not an object"),
        ([{**GOOD, "arival": 1}], "unknown key 'arival'"),
        ([{"output_len": 2}], "input_len must be a positive integer"),
        ([{**GOOD, "input_len": 0}], "input_len must be a positive integer"),
        ([{**GOOD, "input_len": True}], "input_len must be a positive integer"),
        ([{"input_len": 3}], "output_len must be a positive integer, got None"),
        ([{**GOOD, "output_len": 2.0}], "output_len must be a positive integer, got 2.0"),
        ([{**GOOD, "prompt_len": 4}], "said to be 3 and 4"),
        ([{**GOOD, "prompt_token_ids": [1, 2]}], "said to be 3 and 2"),
        ([{"prompt_token_ids": [], "output_len": 1}], "not a list of token ids"),
        ([{"prompt_token_ids": [1, -2], "output_len": 1}], "not a list of token ids"),
        ([{**GOOD, "arrival": -1}], "arrival must be a number of seconds >= 0, got -1"),
        ([{**GOOD, "arrival": "1"}], "got '1'"),
        (['{"input_len": 3, "output_len": 2, "arrival": NaN}'], "got nan"),
        ([GOOD, {**GOOD, "arrival": 1}], "some have none"),
    ],
)
def test_what_is_no_trace(tmp_path, lines, message):
    with pytest.raises(ValueError) as caught:
        read_trace(write(tmp_path, *lines))
    assert message in str(caught.value)
    assert "trace.jsonl" in str(caught.value)


def test_a_trace_that_is_not_there():
    with pytest.raises(ValueError, match="No such file"):
        read_trace("/nonexistent/trace.jsonl")


def test_jobs_that_cannot_run():
    check_jobs([Job([1, 2], 3)], max_model_len=5, vocab_size=3)
    with pytest.raises(ValueError, match=r"request 1 has 2 \+ 4 tokens; max_model_len is 5"):
        check_jobs([Job([1, 2], 3), Job([1, 2], 4)], max_model_len=5, vocab_size=3)
    with pytest.raises(ValueError, match="request 0 has token id 3; the vocabulary has 3"):
        check_jobs([Job([1, 3], 3)], max_model_len=5, vocab_size=3)
