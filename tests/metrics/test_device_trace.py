"""A device's busy time is the union of its kernels' times."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.metrics.device_trace import Span, summarise_spans

SPANS = st.lists(
    st.builds(Span, st.sampled_from("abc"), st.integers(0, 60), st.integers(0, 20)), min_size=1, max_size=20
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(spans=SPANS)
def test_busy_time_is_the_union(spans):
    trace = summarise_spans(spans)
    first = min(span.start for span in spans)
    last = max(span.start + span.duration for span in spans)
    covered = {tick for span in spans for tick in range(int(span.start), int(span.start + span.duration))}
    assert trace.seconds == pytest.approx((last - first) / 1e9)
    assert trace.busy == pytest.approx(len(covered) / 1e9)
    assert sum(kernel.count for kernel in trace.kernels) == trace.num_kernels == len(spans)
    assert sum(kernel.seconds for kernel in trace.kernels) == pytest.approx(sum(s.duration for s in spans) / 1e9)
    times = [kernel.seconds for kernel in trace.kernels]
    assert times == sorted(times, reverse=True)


def test_an_empty_trace_has_no_idle_share():
    assert summarise_spans([]).idle_share is None
    assert summarise_spans([Span("a", 5, 10), Span("a", 25, 10)]).idle_share == pytest.approx(1 / 3)
