"""A plan in the making: its rows, and who gets how much of the token budget."""

from __future__ import annotations

from itertools import islice

from jaxinfer.core import PlanRow, Request
from jaxinfer.scheduler.limits import SchedulerLimits
from jaxinfer.scheduler.queue import RequestQueue
from jaxinfer.scheduler.running import RunningTable
from jaxinfer.scheduler.steady import SteadyRows


class Draft:
    """Rows that may still leave, and what is left of the budget.

    Fairness: requests that want more than `long_threshold` tokens share half the budget, and what the short ones leave
    of the other half.

    Args:
      limits: budget, lengths, what is long.
      running: the running requests.
      waiting: the queue, from which requests are admitted later.
      group: whose step it is.
    """

    def __init__(self, limits: SchedulerLimits, running: RunningTable, waiting: RequestQueue, group: int = 0) -> None:
        self._limits, self._running, self._waiting, self.group = limits, running, waiting, group
        self.budget = limits.max_num_batched_tokens
        self.rows: dict[Request, PlanRow] = {}
        self.steady: SteadyRows | None = None  # None where every request is looked at
        self.copies: list[tuple[int, int]] = []
        self.num_preempted = 0
        self._long_budget: int | None = None  # computed when the first long request is met

    def num_wanted(self, request: Request) -> int:
        """Tokens a request could compute now."""
        num_computed, _, num_placeholders, num_samples, num_drafts = request.counts
        if request.num_output_tokens + num_samples >= request.max_tokens:
            return 0  # the steps in flight must already reach its end
        ahead = request.num_tokens + num_placeholders + num_drafts
        return min(ahead, self._limits.max_model_len - 1) - num_computed

    def chunk(self, wanted: int) -> int:
        """How many of the wanted tokens the budget grants; 0 passes the request over."""
        granted = min(wanted, self.budget)
        if wanted <= self._limits.long_threshold:
            return granted
        if self._long_budget is None:
            self._long_budget = self._find_long_budget()
        return min(granted, self._long_budget)

    def grant_steady(self, steady: SteadyRows, num_ahead: int) -> None:
        """A token for each of the first `num_ahead` steady requests, while the budget lasts."""
        self.budget -= steady.grant(num_ahead, self.budget)

    def add(self, request: Request, num_tokens: int, *, first_new_block: int = 0, is_admission: bool = False) -> None:
        """Plans a row of a running request."""
        self._spend(request, num_tokens)
        self.rows[request] = PlanRow(
            request=request,
            slot=request.slot,
            tenure=request.tenure,
            start=request.num_computed_tokens,
            num_tokens=num_tokens,
            is_admission=is_admission,
            first_new_block=first_new_block,
        )

    def drop(self, victim: Request) -> None:
        """Takes a request's row, if it has one, out of the plan and its tokens back."""
        row = self.rows.pop(victim, None)
        if row is not None:
            self._spend(victim, -row.num_tokens)

    def _spend(self, request: Request, num_tokens: int) -> None:
        self.budget -= num_tokens
        if self._long_budget is not None and self.num_wanted(request) > self._limits.long_threshold:
            self._long_budget -= num_tokens

    def _find_long_budget(self) -> int:
        """The long requests' share."""
        budget, threshold = self._limits.max_num_batched_tokens, self._limits.long_threshold
        short = budget - self.budget  # granted so far, all to short ones
        wanted = self._running.find_wanted(self._limits.max_model_len)
        wanted[[request.slot for request in self.rows]] = 0
        wanted = wanted[self._running.slots_of(self.group)]
        short += int(wanted[wanted <= threshold].sum()) - (self.steady.num_granted if self.steady else 0)
        waiting = (request for request in self._waiting if request not in self.rows)
        for request in islice(waiting, self._running.num_free_slots(self.group)):
            if short >= budget - budget // 2:
                break
            num_wanted = self.num_wanted(request)
            if num_wanted <= threshold:
                short += num_wanted
        return max(budget // 2, budget - short)
