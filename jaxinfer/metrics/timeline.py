"""When things happened to one request."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jaxinfer.core import RequestMetrics


@dataclass(slots=True)
class Timeline:
    """Moments in seconds of a monotonic clock; None for what has not happened."""

    arrival: float = field(default_factory=time.perf_counter)
    first_scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    num_output_tokens: int = 0
    num_preemptions: int = 0

    def record_scheduled(self, now: float) -> None:
        if self.first_scheduled is None:
            self.first_scheduled = now

    def record_tokens(self, count: int, now: float) -> None:
        if self.first_token is None:
            self.first_token = now
        self.last_token = now
        self.num_output_tokens += count

    def summary(self) -> RequestMetrics:
        """TTFT counts queueing; TPOT = (last - first) / (n - 1), None for fewer than two tokens."""
        tpot = None
        if self.num_output_tokens > 1 and self.first_token is not None and self.last_token is not None:
            tpot = (self.last_token - self.first_token) / (self.num_output_tokens - 1)
        return RequestMetrics(
            time_to_first_token=self._since_arrival(self.first_token),
            time_per_output_token=tpot,
            e2e_latency=self._since_arrival(self.finished),
            queue_time=self._since_arrival(self.first_scheduled),
            num_preemptions=self.num_preemptions,
        )

    def _since_arrival(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self.arrival


def record_token_each(timelines: Iterable[Timeline], now: float) -> None:
    """One token for each of these. They are many, so no call each."""
    for timeline in timelines:
        if timeline.first_token is None:
            timeline.first_token = now
        timeline.last_token = now
        timeline.num_output_tokens += 1


def combine(parts: Sequence[RequestMetrics]) -> RequestMetrics:
    """Times of a request with several answers: the first token of any, the end of the last, the mean TPOT."""
    if len(parts) == 1:
        return parts[0]

    def known(name: str) -> list[float]:
        return [value for part in parts if (value := getattr(part, name)) is not None]

    tpots = known("time_per_output_token")
    ends = known("e2e_latency")
    return RequestMetrics(
        time_to_first_token=min(known("time_to_first_token"), default=None),
        time_per_output_token=sum(tpots) / len(tpots) if tpots else None,
        e2e_latency=max(ends) if len(ends) == len(parts) else None,
        queue_time=min(known("queue_time"), default=None),
        num_preemptions=sum(part.num_preemptions for part in parts),
    )
