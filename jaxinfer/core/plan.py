"""What a step computes, and what it said.

A plan has two kinds of rows, in this order:

      decodes   a request that computes and samples exactly one token: numbers only, as columns
      others    everything else, a `PlanRow` each: admissions, chunks of prompts, drafts; single tokens first

Results come in the same two parts. `StepPlan.rows` shows both kinds as objects.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxinfer.core.request import Request


@dataclass(slots=True)
class PlanRow:
    """One request's share of a step. Holds the object: ids and slots may have new owners at commit."""

    request: Request
    slot: int
    tenure: int  # the request's when planned: if it has another at commit, the row is stale
    start: int  # first position computed (host's upper bound)
    num_tokens: int  # tokens scheduled, drafts included
    num_drafts: int = 0
    samples: bool = False
    is_admission: bool = False
    first_new_block: int = 0  # block_ids[first_new_block:] were appended by this plan


def _no_numbers() -> np.ndarray:
    return np.zeros(0, np.int64)


@dataclass(slots=True)
class DecodeRows:
    """Rows of one token that samples, R of them. All arrays int64 [R] but for `new_blocks`.

    Never changed once made.
    """

    requests: list[Request] = field(default_factory=list)
    slots: np.ndarray = field(default_factory=_no_numbers)
    tenures: np.ndarray = field(default_factory=_no_numbers)  # as in `PlanRow`
    starts: np.ndarray = field(default_factory=_no_numbers)  # the position computed (host's upper bound)
    from_carry: np.ndarray = field(default_factory=_no_numbers)  # 1: the token is still on the device only
    token_ids: np.ndarray = field(default_factory=_no_numbers)  # 0 where it is
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)  # (slot, column of its table, block)

    def __len__(self) -> int:
        return len(self.requests)

    def row(self, number: int) -> PlanRow:
        """The row as an object."""
        slot = int(self.slots[number])
        request = self.requests[number]
        new = (column for owner, column, _ in self.new_blocks if owner == slot)
        return PlanRow(
            request=request,
            slot=slot,
            tenure=int(self.tenures[number]),
            start=int(self.starts[number]),
            num_tokens=1,
            samples=True,
            first_new_block=next(new, len(request.block_ids)),
        )


@dataclass(slots=True)
class StepPlan:
    """What one step computes: rows with a single token first, then the longer ones."""

    others: list[PlanRow] = field(default_factory=list)
    num_decodes: int = 0  # leading rows with exactly one token, of both kinds
    num_tokens: int = 0
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, destination) blocks, before the step
    num_preempted: int = 0
    decodes: DecodeRows = field(default_factory=DecodeRows)
    needs_full_sampler: bool = False  # of the rows that sample, one does
    uses_cuts: bool = False  # the same
    wants_logprobs: bool = False  # the same
    group: int = 0  # whose turn it was: all rows' slots are of this group
    _rows: list[PlanRow] | None = None

    @property
    def num_rows(self) -> int:
        return len(self.decodes) + len(self.others)

    @property
    def is_empty(self) -> bool:
        return self.num_rows == 0

    @property
    def rows(self) -> list[PlanRow]:
        """All rows as objects, in their order. Slow: for tests and failures."""
        if not self.decodes:
            return self.others
        if self._rows is None:
            self._rows = [*map(self.decodes.row, range(len(self.decodes))), *self.others]
        return self._rows


@dataclass(slots=True)
class StepResult:
    """Tokens of one step: of the plan's `others` a list a row, empty for rows that do not sample, None for a failed
    one; of its `decodes` an int array [R], -1 for a failed row.
    """

    token_ids: list[list[int] | None]
    logprobs: list[Any] | None = None  # a row of the plan: (sampled, sampled rank, top ids, top logprobs)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    decode_token_ids: np.ndarray = field(default_factory=_no_numbers)


@dataclass(slots=True)
class PromptLogprobs:
    """Log-probabilities of a chunk of a prompt: `rows[i]` is of the token at position `start + i`."""

    request: Request
    start: int
    rows: list[Any]  # (logprob, rank, top ids, top logprobs)
