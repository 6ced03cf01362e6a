"""What a device did during a trace: how long it was idle, and which kernels took the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """One kernel's run on the device: its name, and nanoseconds."""

    name: str
    start: float
    duration: float


@dataclass(frozen=True)
class KernelTime:
    """All runs of the kernels of one name, in seconds."""

    name: str
    count: int
    seconds: float


@dataclass(frozen=True)
class DeviceTrace:
    """`seconds` runs from the first kernel's start to the last one's end; `busy` is when at least one ran."""

    seconds: float
    busy: float
    num_kernels: int
    kernels: tuple[KernelTime, ...]  # the longest first

    @property
    def idle_share(self) -> float | None:
        """Share of the time without any kernel; None for an empty trace."""
        return 1.0 - self.busy / self.seconds if self.seconds > 0 else None


def summarise_spans(spans: Iterable[Span]) -> DeviceTrace:
    """Adds up kernels by name and unites their times; overlapping ones count once."""
    ordered = sorted(spans, key=lambda span: span.start)
    if not ordered:
        return DeviceTrace(0.0, 0.0, 0, ())
    totals: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    busy, end = 0.0, ordered[0].start
    for span in ordered:
        stop = span.start + span.duration
        busy += max(stop - max(span.start, end), 0.0)
        end = max(end, stop)
        totals[span.name][0] += 1
        totals[span.name][1] += span.duration
    kernels = [KernelTime(name, int(count), duration / 1e9) for name, (count, duration) in totals.items()]
    kernels.sort(key=lambda kernel: -kernel.seconds)
    return DeviceTrace((end - ordered[0].start) / 1e9, busy / 1e9, len(ordered), tuple(kernels))
