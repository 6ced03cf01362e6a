"""Objectives: all must be met, equality passes, failures are not good."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.metrics.goodput import Objectives, measure_goodput
from jaxinfer.metrics.summary import RequestRecord


def record(*events, error=None):
    return RequestRecord(0.0, 5, events=list(events), error=error)


FAST = record((0.2, 1), (0.25, 2))  # TTFT 200 ms, TPOT 50, E2E 250
SLOW_START, SLOW_TOKENS = record((0.3, 1), (0.31, 2)), record((0.1, 1), (0.2, 2))


def test_all_objectives_must_be_met_and_equality_passes():
    objectives = Objectives(ttft=200, tpot=50, e2e=250)
    assert objectives.are_met(FAST)
    assert not objectives.are_met(SLOW_START)
    assert not objectives.are_met(SLOW_TOKENS)
    assert Objectives(tpot=50).are_met(SLOW_START)
    assert not Objectives(ttft=199.9).are_met(FAST)
    assert not Objectives(e2e=249.9).are_met(FAST)


@given(st.floats(1e-3, 1e5))
def test_equality_passes_whatever_the_rounding(milliseconds):
    assert Objectives(ttft=milliseconds, e2e=milliseconds).are_met(record((milliseconds / 1e3, 1)))


def test_one_token_has_no_tpot_to_miss():
    assert Objectives(tpot=1e-6).are_met(record((3.0, 1)))


def test_failures_are_not_good():
    assert not Objectives().are_met(record((0.1, 1), error="a step failed"))
    assert not Objectives().are_met(record())


def test_goodput_and_attainment():
    """Four requests in half a second, two of them good."""
    records = [FAST, record((0.1, 1)), record((0.5, 1)), record(error="no")]
    got = measure_goodput(records, Objectives(ttft=200))
    assert (got.num_good, got.requests_per_second, got.attainment) == (2, 4.0, 0.5)
    assert measure_goodput(records, Objectives(ttft=200), seconds=2.0).requests_per_second == 1.0


def test_nothing_gives_none():
    got = measure_goodput([], Objectives(ttft=1))
    assert (got.num_good, got.requests_per_second, got.attainment) == (0, None, None)
    none_answered = measure_goodput([record()], Objectives())
    assert (none_answered.requests_per_second, none_answered.attainment) == (None, 0.0)


def test_parse():
    assert Objectives.parse("ttft:200, tpot:50,e2e:5e3") == Objectives(ttft=200, tpot=50, e2e=5000)
    assert Objectives.parse("e2e:1").to_dict() == {"e2e": 1.0}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "NAME:MS"),
        ("itl:5", "'itl:5'"),
        ("ttft", "not a number"),
        ("ttft:x", "'x' is not a number"),
        ("ttft:0", "not a positive"),
        ("ttft:nan", "not a positive"),
        ("ttft:inf", "not a positive"),
        ("ttft:1,ttft:2", "stated twice"),
        ("ttft:1,", "NAME:MS"),
    ],
)
def test_what_is_no_objective(text, message):
    with pytest.raises(ValueError, match=message):
        Objectives.parse(text)
