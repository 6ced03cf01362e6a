"""The two orders in which requests wait."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from jaxinfer.core import Request


class RequestQueue(Protocol):
    """Waiting requests in the order in which they are to be admitted."""

    def add(self, request: Request) -> None: ...
    def add_preempted(self, request: Request) -> None: ...
    def remove(self, request: Request) -> None: ...
    def __iter__(self) -> Iterator[Request]: ...
    def __len__(self) -> int: ...


class FCFSQueue:
    """First come, first served; a preempted request goes to the head."""

    def __init__(self) -> None:
        self._requests: OrderedDict[Request, None] = OrderedDict()

    def add(self, request: Request) -> None:
        self._requests[request] = None

    def add_preempted(self, request: Request) -> None:
        self._requests[request] = None
        self._requests.move_to_end(request, last=False)

    def remove(self, request: Request) -> None:
        del self._requests[request]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


class PriorityQueue:
    """By (priority, arrival), smaller first; a preempted request returns to its place."""

    def __init__(self) -> None:
        self._requests: list[Request] = []

    @staticmethod
    def _key(request: Request) -> tuple[int, int]:
        return request.priority, request.arrival

    def add(self, request: Request) -> None:
        bisect.insort(self._requests, request, key=self._key)

    add_preempted = add

    def remove(self, request: Request) -> None:
        at = bisect.bisect_left(self._requests, self._key(request), key=self._key)
        while self._requests[at] is not request:  # only where two arrivals are equal
            at += 1
        del self._requests[at]

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)


def make_queue(policy: str) -> RequestQueue:
    """The queue for a policy, "fcfs" or "priority"."""
    if policy == "fcfs":
        return FCFSQueue()
    if policy == "priority":
        return PriorityQueue()
    raise ValueError(f"policy must be 'fcfs' or 'priority', got {policy!r}")
