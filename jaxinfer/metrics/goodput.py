"""Goodput: requests a second that meet every stated objective."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from jaxinfer.metrics.summary import RequestRecord, makespan


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """Service-level objectives in milliseconds; None is not stated. Equality meets one."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "ttft:200,tpot:50,e2e:5000".

        Raises:
          ValueError: an unknown name, a name said twice, or what is no time.
        """
        stated: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = (item.strip() for item in part.partition(":"))
            if name not in cls.__dataclass_fields__:
                raise ValueError(f"objective {part.strip()!r}: expected NAME:MS with a name of ttft, tpot, e2e")
            if name in stated:
                raise ValueError(f"objective {name} is stated twice")
            try:
                stated[name] = float(value)
            except ValueError:
                raise ValueError(f"objective {name}: {value!r} is not a number of milliseconds") from None
            if not 0 < stated[name] < math.inf:
                raise ValueError(f"objective {name}: {value!r} is not a positive number of milliseconds")
        return cls(**stated)

    def are_met(self, record: RequestRecord) -> bool:
        """Whether a request meets all of them: a failed one does not; a single token has no TPOT to miss."""
        if not record.is_good:
            return False
        pairs = ((self.ttft, record.ttft), (self.tpot, record.tpot), (self.e2e, record.e2e))
        return all(
            limit is None or value is None or value * 1e3 <= limit * (1 + 1e-12)  # 1e-12: seconds were rounded
            for limit, value in pairs
        )

    def to_dict(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class Goodput:
    """How many requests met the objectives: in all, a second, and as a share of all."""

    num_good: int
    requests_per_second: float | None
    attainment: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure_goodput(records: Sequence[RequestRecord], objectives: Objectives, seconds: float | None = None) -> Goodput:
    """Goodput over the makespan, or over `seconds`; None where there were no requests or no time went by."""
    num_good = sum(map(objectives.are_met, records))
    span = makespan(records) if seconds is None else seconds
    return Goodput(num_good, num_good / span if span else None, num_good / len(records) if records else None)
