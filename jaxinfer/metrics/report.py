"""Measured figures beside those of the floor, as plain values for JSON and tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxinfer.metrics.floor import Floor
from jaxinfer.metrics.goodput import Objectives, measure_goodput
from jaxinfer.metrics.summary import QUANTILES, RequestRecord, summarize_latencies, summarize_throughput

LATENCIES = ("ttft", "tpot", "itl", "e2e")
RATES = ("output_tokens_per_second", "total_tokens_per_second", "requests_per_second")


def figures(
    records: Sequence[RequestRecord], seconds: float | None = None, objectives: Objectives | None = None
) -> dict[str, Any]:
    """Throughput, latencies in milliseconds and, where objectives are stated, goodput.

    Args:
      records: of all requests.
      seconds: wall time, where the requests' own makespan is not meant.
      objectives: of goodput.
    """
    latencies = {f"{name}_ms": one.to_dict() for name, one in summarize_latencies(records).items()}
    throughput = summarize_throughput(records, seconds).to_dict()
    goodput = None if objectives is None else measure_goodput(records, objectives, seconds).to_dict()
    return {"throughput": throughput, **latencies, "goodput": goodput}


def floor_figures(floor: Floor, objectives: Objectives | None = None) -> dict[str, Any]:
    """The same of an ideal run, and what its steps cost."""
    return {**figures(floor.records, objectives=objectives), "cost": floor.to_dict()}


def shares(measured: dict[str, Any], floor: dict[str, Any]) -> dict[str, Any]:
    """How near the measured figures come to the floor's: 1 is at it. None where either is missing or zero."""
    rates = {name: _ratio(measured["throughput"][name], floor["throughput"][name]) for name in RATES}
    times = {
        f"{name}_ms": {
            kind: _ratio(floor[f"{name}_ms"][kind], measured[f"{name}_ms"][kind]) for kind in ("mean", *QUANTILES)
        }
        for name in LATENCIES
    }
    return {**rates, **times}


def _ratio(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below
