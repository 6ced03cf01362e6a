"""What the lines around the tables say."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer.metrics.tables import footer


def report(failed=0, **counts) -> dict[str, Any]:
    return {
        "engine": {"load_seconds": 1.25, "num_programs": 7, "compile_seconds": 0.5},
        "device": {"kind": "abacus"},
        "floor": None,
        "measured": {
            "seconds": 2.0,
            "counts": {"num_steps": 3, **counts},
            "throughput": {"num_failed": failed, "num_requests": 4},
            "errors": ["a step failed"],
        },
    }


def test_nothing_suspicious():
    assert footer(report()) == [
        "loaded in 1.2 s (7 programs, compiled in 0.5 s), 3 steps in 2.00 s",
        "no floor: bandwidth and peak of abacus are not known",
    ]


@pytest.mark.parametrize(
    ("given", "note"),
    [
        ({"failed": 2}, "note: 2 of 4 requests failed: a step failed"),
        ({"num_preemptions": 5}, "note: 5 preemptions: the KV cache is too small"),
        ({"num_programs": 1}, "note: programs were compiled while it was measured"),
        ({"num_compiles_while_serving": 1}, "note: programs were compiled while it was measured"),
    ],
)
def test_what_makes_figures_doubtful_is_told(given, note):
    lines = footer(report(**given))
    assert len(lines) == 3
    assert lines[-1].startswith(note)
