"""The running requests and their numbers as columns, so that most are planned and settled without a look at each.

      slot:              0     1     2     3
      owners            r7     -    r2    r9
                       ---------------------
      computed          41     0   130    12  \\
      in_flight          2     0     2    12   |  the owner's counts. There are no others: while a request has a
      placeholders       2     0     2     0   |  slot, its `num_computed_tokens` and the like read and write these
      samples            2     0     2     0   |
      drafts             0     0     0     0  /
      num_tokens        40     0   129    30  \\
      capacities        64     0   192    64   |  what follows from its lists and parameters, kept beside them:
      prompt_lens       33     0     9    30   |  tokens known, tokens that its blocks hold, prompt length, tokens
      max_lens          97     0   200    31   |  it may have at most, the newest token, ids that end it, flags
      last_tokens      517     0    88     4   |
      end_ids, flags    ..    ..    ..    ..  /
      tenures           31    -1    12    40     which stay of which request this is

r7 and r2 are steady: one token after the next, two steps in flight. r9 is in the middle of its prompt.

The border between a request and its columns is `add` and `remove`; `check_integrity` compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxinfer.core import Request
from jaxinfer.core.request import COMPUTED, IN_FLIGHT, NUM_COUNTS, SAMPLES

NUM_END_IDS = 4
"""End ids that are compared as columns. A request with more of them is asked for each token."""
NEEDS_FULL_SAMPLER, WANTS_LOGPROBS, IS_WATCHED, USES_CUTS = 1, 2, 4, 8
"""Flags."""


class RunningTable:
    """The requests that have a slot, in the order of their admission, and a row of numbers for each.

    A column is int64 [num_slots], with 0 where a slot has no owner. Slot s is of group s modulo `num_groups`.
    """

    def __init__(self, num_slots: int, block_size: int, num_groups: int = 1) -> None:
        self._block_size = block_size
        self._requests: dict[Request, None] = {}
        slots = list(range(num_slots - 1, -1, -1))
        self._free_slots = [[slot for slot in slots if slot % num_groups == group] for group in range(num_groups)]
        self._order: np.ndarray | None = None  # slots of the requests; None when they have changed
        self._num_tenures = 0
        self.owners: list[Request | None] = [None] * num_slots
        self._counts = np.zeros((NUM_COUNTS, num_slots), np.int64)
        self._cells = [memoryview(self._counts[:, slot]) for slot in range(num_slots)]
        self.computed, self.in_flight, self.placeholders, self.samples, self.drafts = self._counts
        self._derived = np.zeros((6, num_slots), np.int64)
        self.num_tokens, self.capacities, self.prompt_lens, self.max_lens, self.last_tokens, self.flags = self._derived
        self.end_ids = np.full((NUM_END_IDS, num_slots), -1, np.int64)
        self.tenures = np.full(num_slots, -1, np.int64)

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def last(self) -> Request:
        return next(reversed(self._requests))

    def num_free_slots(self, group: int) -> int:
        return len(self._free_slots[group])

    @property
    def slots(self) -> np.ndarray:
        """Slots of the requests in their order, int64 [R]."""
        if self._order is None:
            self._order = np.array([request.slot for request in self._requests], np.int64)
        return self._order

    def slots_of(self, group: int) -> np.ndarray:
        """Those of a group, int64 [R of the group]."""
        num_groups = len(self._free_slots)
        return self.slots if num_groups == 1 else self.slots[self.slots % num_groups == group]

    # -- the border ---------------------------------------------------------------------------------

    def add(self, request: Request, group: int = 0) -> None:
        """Gives a request with blocks a slot of a group; its counts are here from now on."""
        slot = self._free_slots[group].pop()
        self._requests[request], self._order = None, None
        self._counts[:, slot] = request.counts
        self._derived[:, slot] = _derive(request, self._block_size)
        self.end_ids[:, slot] = _end_ids(request)
        self.tenures[slot] = self._num_tenures
        self.owners[slot] = request
        request.counts, request.slot, request.tenure = self._cells[slot], slot, self._num_tenures
        self._num_tenures += 1

    def remove(self, request: Request) -> None:
        """Takes the slot away; its counts are the request's own again."""
        slot = request.slot
        del self._requests[request]
        self._order = None
        request.counts, request.slot, request.tenure = self._counts[:, slot].tolist(), -1, -1
        self.owners[slot] = None
        self._counts[:, slot] = self._derived[:, slot] = 0
        self.end_ids[:, slot] = self.tenures[slot] = -1
        self._free_slots[slot % len(self._free_slots)].append(slot)

    def note_tokens(self, request: Request) -> None:
        """To be called after a running request was given tokens."""
        self.num_tokens[request.slot] = request.num_tokens
        self.last_tokens[request.slot] = request.token_ids[-1]

    def note_blocks(self, request: Request) -> None:
        """To be called after a running request was given blocks."""
        self.capacities[request.slot] = len(request.block_ids) * self._block_size

    def check_integrity(self) -> None:
        """Asserts that every column says what the running requests say, and that other slots say nothing."""
        owners = {request.slot: request for request in self}
        free = [slot for slots in self._free_slots for slot in slots]
        assert sorted([*owners, *free]) == list(range(len(self.owners))), "slots are lost"
        assert self.slots.tolist() == list(owners), "slots are in another order"
        assert self.owners == [owners.get(slot) for slot in range(len(self.owners))], "slots have other owners"
        assert (self.tenures[free] == -1).all(), "a slot has a tenure but no owner"
        assert not self._counts[:, free].any(), "a slot has counts but no owner"
        assert not self._derived[:, free].any(), "a slot has lengths but no owner"
        for slot, owner in owners.items():
            assert owner.tenure == self.tenures[slot], f"slot {slot} has another's tenure"
            assert owner.counts is self._cells[slot], f"request {owner.request_id} counts elsewhere"
            derived = _derive(owner, self._block_size)
            assert self._derived[:, slot].tolist() == derived, f"columns of slot {slot} are not {derived}"
            assert self.end_ids[:, slot].tolist() == _end_ids(owner), f"end ids of slot {slot} are another's"

    # -- whole columns ------------------------------------------------------------------------------

    def find_wanted(self, max_model_len: int) -> np.ndarray:
        """Tokens that each request could compute now: see `Draft.num_wanted`."""
        ahead = self.num_tokens + self.placeholders + self.drafts
        wanted = np.minimum(ahead, max_model_len - 1) - self.computed
        wanted[self.num_tokens + self.samples >= self.max_lens] = 0
        return wanted

    def find_steady(self, wanted: np.ndarray) -> np.ndarray:
        """Bool: the request wants one token, the last that is known or to come, and behind its prompt. So the row
        samples, and registers at most one full block.
        """
        is_last = self.computed + 1 == self.num_tokens + self.placeholders
        return (wanted == 1) & is_last & (self.drafts == 0) & (self.computed >= self.prompt_lens)

    def raise_counts(self, is_planned: np.ndarray) -> None:
        """One more token, which is sampled, is in flight for these (int64 [num_slots], 0 or 1)."""
        self._counts[COMPUTED : SAMPLES + 1] += is_planned

    def settle(self, slots: np.ndarray, tokens: np.ndarray) -> None:
        """A step with one token each has come back: its placeholder is a token."""
        is_back = np.zeros_like(self.computed)
        is_back[slots] = 1
        self._counts[IN_FLIGHT : SAMPLES + 1] -= is_back
        self.num_tokens += is_back
        self.last_tokens[slots] = tokens

    def find_committed(self) -> np.ndarray:
        """Tokens whose K and V are surely written."""
        return self.computed - self.in_flight

    def may_end(self, slots: np.ndarray) -> np.ndarray:
        """Bool [R]: the newest token may end the request, or its caller wants to see each."""
        is_end = (self.num_tokens >= self.max_lens) | (self.flags & IS_WATCHED != 0)
        is_end |= (self.end_ids == self.last_tokens).any(axis=0)
        return is_end[slots]


def _derive(request: Request, block_size: int) -> list[int]:
    """What the columns of `_derived` hold for a request."""
    params, num_prompt = request.params, request.num_prompt_tokens
    is_watched = request.is_watched or len(request.end_token_ids) > NUM_END_IDS
    flags = (
        NEEDS_FULL_SAMPLER * params.needs_full_sampler
        + WANTS_LOGPROBS * (params.logprobs is not None)
        + IS_WATCHED * is_watched
        + USES_CUTS * params.uses_cuts
    )
    return [
        request.num_tokens,
        len(request.block_ids) * block_size,
        num_prompt,
        num_prompt + request.max_tokens,
        request.token_ids[-1],
        flags,
    ]


def _end_ids(request: Request) -> list[int]:
    """The column `end_ids`: none where there are too many."""
    ends = sorted(request.end_token_ids)
    ends = ends if len(ends) <= NUM_END_IDS else []
    return [*ends, *[-1] * (NUM_END_IDS - len(ends))]
