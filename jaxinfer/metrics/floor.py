"""The same work on an ideal engine: every step takes its roofline's time, and nothing else takes any.

The ideal engine schedules as the real one does: running rows first, one token each, then prompts in the order of their
arrival, in chunks, while the token budget and the rows last. Its pool never runs out. So its times stand beside
measured ones: the same percentiles of the same requests.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxinfer.metrics.roofline import ModelShape, Precision, Roof, StepCost, StepWork, cost_of
from jaxinfer.metrics.summary import RequestRecord
from jaxinfer.metrics.workload import Job


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a step may hold."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass
class Floor:
    """An ideal run: when its requests got their tokens, and what its steps cost together."""

    records: list[RequestRecord]
    cost: StepCost = field(default_factory=StepCost)
    num_steps: int = 0
    seconds: float = 0.0  # busy
    memory_bound_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "memory_bound_seconds": self.memory_bound_seconds,
            "num_steps": self.num_steps,
            **self.cost.to_dict(),
        }


def find_floor(
    jobs: Sequence[Job], shape: ModelShape, roof: Roof, limits: Limits, precision: Precision, num_replicas: int = 1
) -> Floor:
    """Runs the jobs on the ideal engine.

    Args:
      jobs: with arrivals in seconds from the start, in any order; prefix hits as `num_cached_tokens`.
      shape: of the model.
      roof: of the device; of several replicas together.
      limits: of the engine; of several replicas together.
      precision: of weights and cache.
      num_replicas: engines that the jobs are dealt to as they come. Each has its share of the roof and reads all
        weights in its own steps: fewer rows each, in nearly as many steps.

    Returns:
      Of replicas the costs of all, and steps and seconds of the busiest.
    """
    share = dataclasses.replace(roof, bandwidth=roof.bandwidth / num_replicas, peak=roof.peak / num_replicas)
    most = Limits(**{name: max(1, value // num_replicas) for name, value in dataclasses.asdict(limits).items()})
    order = sorted(range(len(jobs)), key=lambda index: jobs[index].arrival)
    dealt = [order[first::num_replicas] for first in range(num_replicas)]
    floors = [_Ideal([jobs[index] for index in own], shape, share, most, precision).run() for own in dealt]
    cost, records = StepCost(), dict[int, RequestRecord]()
    for own, floor in zip(dealt, floors, strict=True):
        cost.add(floor.cost)
        records.update(zip(own, floor.records, strict=True))
    busiest = max(floors, key=lambda floor: floor.seconds)
    return dataclasses.replace(busiest, records=[records[index] for index in range(len(jobs))], cost=cost)


class _Ideal:
    """The engine: jobs wait, are filled (their prompt is computed in chunks), then run (a token a step)."""

    def __init__(
        self, jobs: Sequence[Job], shape: ModelShape, roof: Roof, limits: Limits, precision: Precision
    ) -> None:
        self._jobs, self._shape, self._roof, self._limits, self._precision = jobs, shape, roof, limits, precision
        self._floor = Floor([RequestRecord(job.arrival, job.prompt_len, job.num_cached_tokens) for job in jobs])
        self._waiting = deque(sorted(range(len(jobs)), key=lambda index: jobs[index].arrival))
        self._filling: dict[int, int] = {}  # job -> tokens computed
        self._running: dict[int, int] = {}  # job -> tokens given
        self._context = 0  # tokens of the running jobs' contexts in the next step
        self._now = min((job.arrival for job in jobs), default=0.0)

    def run(self) -> Floor:
        while self._waiting or self._filling or self._running:
            if not self._filling and not self._running:
                self._now = max(self._now, self._jobs[self._waiting[0]].arrival)
            self._step()
        return self._floor

    def _step(self) -> None:
        work = StepWork()
        work.add_decode(len(self._running), self._context)
        filled = self._fill(work)
        self._take_time(work)
        self._context += len(self._running)
        for index in list(self._running):
            self._emit(index, self._running[index] + 1)
        for index in filled:
            del self._filling[index]
            self._context += self._jobs[index].prompt_len + 1
            self._emit(index, 1)

    def _fill(self, work: StepWork) -> list[int]:
        """Adds chunks of prompts to a step; returns the jobs whose prompt it completes."""
        left = self._limits.max_num_batched_tokens - len(self._running)
        completed = []
        for index in self._candidates():
            if left <= 0:
                break
            computed = self._filling.setdefault(index, self._jobs[index].num_cached_tokens)
            chunk = min(left, self._jobs[index].prompt_len - computed)
            is_whole = computed + chunk == self._jobs[index].prompt_len
            work.add_chunk(computed, chunk, samples=is_whole)
            self._filling[index] += chunk
            left -= chunk
            if is_whole:
                completed.append(index)
        return completed

    def _candidates(self):
        yield from list(self._filling)
        waiting = self._waiting
        while waiting and len(self._filling) + len(self._running) < self._limits.max_num_seqs:
            if self._jobs[waiting[0]].arrival > self._now:
                return
            index = waiting[0]
            yield index
            if index in self._filling:
                waiting.popleft()

    def _take_time(self, work: StepWork) -> None:
        cost, floor = cost_of(work, self._shape, self._precision), self._floor
        seconds = cost.seconds(self._roof)
        floor.cost.add(cost)
        floor.num_steps += 1
        floor.seconds += seconds
        floor.memory_bound_seconds += seconds if cost.intensity <= self._roof.ridge else 0.0
        self._now += seconds

    def _emit(self, index: int, count: int) -> None:
        self._floor.records[index].events.append((self._now, count))
        if count < self._jobs[index].output_len:
            self._running[index] = count
            return
        self._running.pop(index, None)
        self._context -= self._jobs[index].prompt_len + count
