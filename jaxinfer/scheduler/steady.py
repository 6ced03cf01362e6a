"""The steady part of a plan: running requests that want one token each and have nothing special about them.

The running requests are served in order, and order decides who gets the budget. So steady ones are not served ahead of
the others but counted between them:

      running, in order     s  s  s  P  s  n  s  s  D  s         s  steady: one token, room in its blocks
      visits                         ^     ^        ^            n  steady, but it needs a new block
      steady ahead of it             3     4        7            P  a chunk of a prompt     D  drafts

`Scheduler` goes from visit to visit; before each, `grant` takes a token of the budget for every steady request that
stands ahead of it. Those that got theirs are always the first ones of the steady requests, and a victim of preemption
is always the last of all (under the priority policy it need not be: then steps that might preempt do without this).
"""

from __future__ import annotations

from itertools import compress

import numpy as np

from jaxinfer.core import DecodeRows, Request
from jaxinfer.scheduler.running import RunningTable


class SteadyRows:
    """Which of the running requests are steady, and how many of them have been granted their token.

    Args:
      running: all running requests.
      max_model_len: as in `SchedulerLimits`.
      group: whose requests these are, R of them.
    """

    def __init__(self, running: RunningTable, max_model_len: int, group: int = 0) -> None:
        wanted, slots = running.find_wanted(max_model_len), running.slots_of(group)
        self._running, self._slots = running, slots
        self._is_steady = running.find_steady(wanted)[slots]
        self._needs_block = (running.computed >= running.capacities)[slots] & self._is_steady
        self._num_wanted = wanted[slots]
        self._is_other = ~self._is_steady & (self._num_wanted > 0)
        self._num_ahead = np.cumsum(self._is_steady) - self._is_steady
        self.num_steady = int(np.count_nonzero(self._is_steady))
        self.num_granted = 0
        self.new_blocks: list[tuple[int, int, int]] = []

    def most_blocks(self, budget: int, block_size: int) -> int:
        """Blocks that running requests can take in this step, at most: one each for those that are steady and at
        the end of theirs, and for the others what all the tokens they want would need, or the whole budget.
        """
        num_steady = int(np.count_nonzero(self._needs_block))
        if not self._is_other.any():
            return num_steady
        slots, wanted = self._slots[self._is_other], self._num_wanted[self._is_other]
        ends = self._running.computed[slots] + np.minimum(wanted, budget)
        lacking = np.maximum(ends - self._running.capacities[slots], 0)
        num_others = int((-(-lacking // block_size)).sum())
        return num_steady + min(num_others, budget // block_size + len(slots))

    def visits(self) -> list[tuple[int, bool, int]]:
        """Requests to be looked at: (slot, whether it is a steady one, steady requests ahead of it)."""
        at = np.flatnonzero(self._needs_block | self._is_other)
        columns = (self._slots[at], self._is_steady[at], self._num_ahead[at])
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def grant(self, num_ahead: int, budget: int) -> int:
        """Grants the first `num_ahead` steady requests their token while the budget lasts; tokens this took."""
        num_new = min(num_ahead - self.num_granted, budget)
        self.num_granted += num_new
        return num_new

    def drop_last(self, victim: Request) -> None:
        """The last of the running requests is being preempted. It had not been granted anything."""
        if not len(self._slots) or self._slots[-1] != victim.slot:
            return  # of another group
        self._slots, self._is_steady = self._slots[:-1], self._is_steady[:-1]
        self.num_steady = int(self._num_ahead[len(self._slots)])
        assert self.num_granted <= self.num_steady, "a granted request was preempted"

    def make_rows(self) -> DecodeRows:
        """The granted requests' rows, by slot; their counts are raised."""
        running = self._running
        is_planned = np.zeros(len(running.owners), np.bool_)
        is_planned[self._slots[self._is_steady][: self.num_granted]] = True
        slots = np.flatnonzero(is_planned)
        from_carry = running.placeholders[slots] > 0
        rows = DecodeRows(
            requests=list(compress(running.owners, is_planned.tobytes())),  # pyright: ignore[reportArgumentType]
            slots=slots,
            tenures=running.tenures[slots],
            starts=running.computed[slots],
            from_carry=from_carry,
            token_ids=np.where(from_carry, 0, running.last_tokens[slots]),
            new_blocks=self.new_blocks,
        )
        running.raise_counts(is_planned)
        return rows
