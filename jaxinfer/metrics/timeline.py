"""When things happened to one request."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from jaxinfer.core import RequestMetrics


@dataclass
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
