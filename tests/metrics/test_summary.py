"""Percentiles against NumPy's, and the definitions of TTFT, TPOT, ITL, E2E and throughput."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.metrics.report import figures, shares
from jaxinfer.metrics.summary import (
    RequestRecord,
    makespan,
    percentile,
    summarize,
    summarize_latencies,
    summarize_throughput,
)

FLOATS = st.floats(-1e9, 1e9, allow_subnormal=False)


@given(st.lists(FLOATS, min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_are_numpys(values, share):
    got = percentile(sorted(values), share)
    np.testing.assert_allclose(got, np.quantile(values, share), rtol=1e-9, atol=1e-6)
    assert min(values) <= got <= max(values)


@given(st.lists(st.one_of(st.none(), FLOATS), max_size=30))
def test_a_summary_leaves_out_what_is_not_there(values):
    there = [value for value in values if value is not None]
    summary = summarize(values)
    assert summary.count == len(there)
    if not there:
        assert set(summary.to_dict().values()) == {0, None}
        return
    expected = np.quantile(there, [0.5, 0.9, 0.95, 0.99])
    got = [summary.p50, summary.p90, summary.p95, summary.p99]
    np.testing.assert_allclose(np.array(got), expected, rtol=1e-9, atol=1e-6)
    np.testing.assert_allclose(summary.mean, np.mean(there), rtol=1e-9, atol=1e-6)
    assert (summary.min, summary.max) == (min(there), max(there))


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_between_0_and_1(share):
    with pytest.raises(ValueError, match="share"):
        percentile([1.0], share)


def test_definitions():
    """Due at 10, tokens at 12, 13, and three at once at 16."""
    record = RequestRecord(10.0, 7, events=[(12.0, 1), (13.0, 2), (16.0, 5)])
    assert record.ttft == 2.0
    assert record.tpot == 1.0
    assert record.itl == [1.0, 3.0]
    assert record.e2e == 6.0
    assert record.e2e == record.ttft + (record.num_output_tokens - 1) * record.tpot


def test_one_token_and_none():
    one, none = RequestRecord(1.0, 3, events=[(2.0, 1)]), RequestRecord(1.0, 3)
    assert (one.ttft, one.tpot, one.itl, one.e2e) == (1.0, None, [], 1.0)
    assert (none.ttft, none.tpot, none.itl, none.e2e) == (None, None, [], None)
    assert one.is_good
    assert not none.is_good
    assert summarize_latencies([one, none])["tpot"].count == 0


def test_throughput_is_over_the_makespan_and_counts_answers_only():
    records = [
        RequestRecord(1.0, 10, events=[(2.0, 1), (3.0, 4)]),
        RequestRecord(0.5, 20, events=[(4.5, 2)]),
        RequestRecord(0.7, 99, events=[(4.0, 50)], error="a step failed"),
    ]
    got = summarize_throughput(records)
    assert (got.num_requests, got.num_failed, got.num_prompt_tokens, got.num_output_tokens) == (3, 1, 30, 6)
    assert (got.seconds, got.output_tokens_per_second, got.total_tokens_per_second) == (4.0, 1.5, 9.0)
    assert got.requests_per_second == 0.5
    assert summarize_throughput(records, 2.0).output_tokens_per_second == 3.0


def test_nothing_gives_none():
    assert makespan([]) is None
    assert makespan([RequestRecord(0.0, 3)]) is None
    assert percentile([], 0.5) is None
    empty = figures([])
    assert empty["throughput"]["output_tokens_per_second"] is None
    assert empty["ttft_ms"]["p99"] is None
    assert empty["goodput"] is None
    assert set(shares(empty, empty)["tpot_ms"].values()) == {None}
