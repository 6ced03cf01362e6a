"""What happened to requests, as statistics. Times in seconds of a monotonic clock; summaries in milliseconds.

TTFT = first token - arrival, queueing included. TPOT = (last - first) / (n - 1), undefined for fewer than two tokens.
ITL = gaps between output events; several tokens that come at once are one event. E2E = last token - arrival.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


@dataclass(slots=True)
class RequestRecord:
    """One request: when it was due, and its output events as (moment, tokens in all so far)."""

    arrival: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    events: list[tuple[float, int]] = field(default_factory=list)
    num_preemptions: int = 0
    error: str | None = None

    @property
    def num_output_tokens(self) -> int:
        return self.events[-1][1] if self.events else 0

    @property
    def is_good(self) -> bool:
        """Whether it gave an answer; SLOs are another matter."""
        return self.error is None and bool(self.events)

    @property
    def ttft(self) -> float | None:
        return self.events[0][0] - self.arrival if self.events else None

    @property
    def tpot(self) -> float | None:
        count = self.num_output_tokens
        return None if count < 2 else (self.events[-1][0] - self.events[0][0]) / (count - 1)

    @property
    def itl(self) -> list[float]:
        moments = [moment for moment, _ in self.events]
        return [after - before for before, after in pairwise(moments)]

    @property
    def e2e(self) -> float | None:
        return self.events[-1][0] - self.arrival if self.events else None


@dataclass(frozen=True)
class Summary:
    """Statistics of some values; all None where there are none."""

    count: int
    mean: float | None
    min: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    max: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which `share` of ascending values lie, by linear interpolation; None for none.

    Raises:
      ValueError: a share outside [0, 1].
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"the share must be in [0, 1], got {share}")
    if not ordered:
        return None
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    return min(max(low + (high - low) * (place - below), low), high)


def summarize(values: Iterable[float | None]) -> Summary:
    """Statistics of the values that are there."""
    ordered = sorted(value for value in values if value is not None)
    if not ordered:
        return Summary(0, *[None] * 7)
    quantiles = {name: percentile(ordered, share) for name, share in QUANTILES.items()}
    mean = math.fsum(ordered) / len(ordered)
    return Summary(len(ordered), mean, ordered[0], max=ordered[-1], **quantiles)


def summarize_latencies(records: Sequence[RequestRecord]) -> dict[str, Summary]:
    """TTFT, TPOT, ITL and E2E in milliseconds, of the requests that gave an answer."""
    good = [record for record in records if record.is_good]
    return {
        "ttft": summarize(_milliseconds(record.ttft for record in good)),
        "tpot": summarize(_milliseconds(record.tpot for record in good)),
        "itl": summarize(gap * 1e3 for record in good for gap in record.itl),
        "e2e": summarize(_milliseconds(record.e2e for record in good)),
    }


@dataclass(frozen=True)
class Throughput:
    """Rates over the makespan, from the first arrival to the last token. None where no time went by."""

    num_requests: int
    num_failed: int
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float | None
    output_tokens_per_second: float | None
    total_tokens_per_second: float | None
    requests_per_second: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize_throughput(records: Sequence[RequestRecord], seconds: float | None = None) -> Throughput:
    """Tokens and answers a second.

    Args:
      records: all requests; prompts of failed ones do not count as work done, tokens they gave do not either.
      seconds: the makespan, where a clock around it says it better than the records.
    """
    good = [record for record in records if record.is_good]
    span = makespan(records) if seconds is None else seconds
    prompt, output = (
        sum(getattr(record, name) for record in good) for name in ("num_prompt_tokens", "num_output_tokens")
    )

    def rate(count: int) -> float | None:
        return count / span if span else None

    failed = len(records) - len(good)
    return Throughput(len(records), failed, prompt, output, span, rate(output), rate(prompt + output), rate(len(good)))


def makespan(records: Sequence[RequestRecord]) -> float | None:
    """Seconds from the first arrival to the last token; None if there was no token."""
    ends = [record.events[-1][0] for record in records if record.events]
    return max(ends) - min(record.arrival for record in records) if ends else None


def _milliseconds(values: Iterable[float | None]) -> Iterable[float]:
    return (value * 1e3 for value in values if value is not None)
