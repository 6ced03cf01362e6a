"""The scheduler: a token budget, no prefill phase and no decode phase.

`num_computed_tokens` chases `num_tokens`. With steps in flight a request has three kinds of tokens:

      position:  0 ............ num_tokens ...... + placeholders ... + drafts
                 |  known to the host |  sampled by steps   |  guesses to
                 |                    |  not yet returned   |  verify
      computed:  |<------ num_computed_tokens ------------->|
                              |<-- num_in_flight_tokens --->|   scheduled, not committed

The names and the admission order follow vLLM's v1 scheduler; the counters are those of the project's simulation:
`schedule` raises them, `commit` corrects them, a preemption resets them and makes what is in flight stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain, islice

from jaxinfer.cache import KVCacheManager, PrefixHit
from jaxinfer.core import FinishReason, PlanRow, Request, RequestStatus, StepPlan, StepResult
from jaxinfer.scheduler.limits import SchedulerLimits
from jaxinfer.scheduler.queue import make_queue

StopCheck = Callable[[Request], FinishReason | None]


def check_token_stop(request: Request) -> FinishReason | None:
    """Whether the newest output token ends a request: an end id after `min_tokens`, then the length."""
    if request.num_output_tokens > request.params.min_tokens:
        token = request.token_ids[-1]
        if token in request.eos_token_ids:
            return FinishReason.STOP
        if token in (request.params.stop_token_ids or ()):
            request.stop_reason = token
            return FinishReason.STOP
    return FinishReason.LENGTH if request.num_output_tokens >= request.max_tokens else None


@dataclass(slots=True)
class Emission:
    """What a commit gave one request: its accepted tokens, and its row in the plan."""

    request: Request
    token_ids: list[int]
    row: int


@dataclass(slots=True)
class _Draft:
    """A plan being made: rows that may still leave, and what is left of the budget."""

    budget: int
    long_budget: int | None = None  # computed when the first long request is met
    rows: dict[Request, PlanRow] = field(default_factory=dict)
    copies: list[tuple[int, int]] = field(default_factory=list)
    num_preempted: int = 0


class Scheduler:
    """Plans steps over running and waiting requests and commits their results.

    Args:
      limits: budget, rows, lengths, policy.
      cache: the blocks.
      check_stop: called after every appended token; says whether the request ends with it.
    """

    def __init__(
        self, limits: SchedulerLimits, cache: KVCacheManager, check_stop: StopCheck = check_token_stop
    ) -> None:
        if limits.max_model_len > cache.num_usable_tokens:
            raise ValueError(
                f"max_model_len {limits.max_model_len} is beyond the cache's {cache.num_usable_tokens} tokens"
            )
        self.limits = limits
        self.cache = cache
        self.running: dict[Request, None] = {}
        self.waiting = make_queue(limits.policy)
        self.num_preemptions = 0
        self._check_stop = check_stop
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))

    # -- requests ---------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def live_requests(self) -> Iterator[Request]:
        return chain(self.running, self.waiting)

    def add(self, request: Request) -> None:
        """Queues a request whose limits were checked (`resolve_max_tokens`)."""
        self.waiting.add(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """Ends a request wherever it is; blocks and slot are free at once. Ending it again does nothing.

        Steps in flight may still write to its blocks: the device runs in program order, so a new owner's writes
        come later.
        """
        if request.is_finished:
            return
        if request.status is RequestStatus.RUNNING:
            self._leave(request, is_broken=reason is FinishReason.ERROR)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.num_output_placeholders = 0

    def check_integrity(self) -> None:
        """Asserts that slots, blocks and live requests agree. For tests and idle times."""
        self.cache.check_integrity(self.live_requests())
        slots = [request.slot for request in self.running]
        assert sorted(slots + self._free_slots) == list(range(self.limits.max_num_seqs)), "slots are lost"
        assert all(request.slot == -1 and not request.block_ids for request in self.waiting)

    # -- planning ---------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plans the next step: running requests in order, then waiting ones while rows and budget last."""
        draft = _Draft(self.limits.max_num_batched_tokens)
        self._schedule_running(draft)
        if not draft.num_preempted:
            self._schedule_waiting(draft)
        return self._finalise(draft)

    def _schedule_running(self, draft: _Draft) -> None:
        for request in list(self.running):
            if draft.budget == 0:
                break
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for one before it
            num_tokens = self._chunk(draft, self._num_wanted(request))
            if num_tokens == 0:
                continue
            first_new_block = len(request.block_ids)
            if self._make_room(draft, request, request.num_computed_tokens + num_tokens):
                self._add_row(draft, request, num_tokens, first_new_block=first_new_block)

    def _schedule_waiting(self, draft: _Draft) -> None:
        admitted: list[Request] = []
        for request in self.waiting:
            if draft.budget == 0 or not self._free_slots:
                break
            hit = self._find_hit(request)
            if hit is None:
                continue
            num_tokens = self._chunk(draft, request.num_tokens - hit.num_tokens)
            if num_tokens == 0:
                continue
            copies = self.cache.admit(request, hit, hit.num_tokens + num_tokens)
            if copies is None:
                break
            admitted.append(request)
            draft.copies.extend(copies)
            request.slot = self._free_slots.pop()
            request.leader = None
            request.num_computed_tokens = hit.num_tokens
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = hit.num_tokens
            self._add_row(draft, request, num_tokens, is_admission=True)
        for request in admitted:
            self.waiting.remove(request)
            self.running[request] = None
            request.status = RequestStatus.RUNNING

    def _find_hit(self, request: Request) -> PrefixHit | None:
        """What a waiting request can reuse; None while it has to wait for something of its own."""
        if request.num_in_flight_tokens:
            return None  # its stale output is still to come
        leader = request.leader
        if leader is not None and leader.status is RequestStatus.WAITING:
            return None
        if leader is not None and leader.status is RequestStatus.RUNNING:
            committed = leader.num_computed_tokens - leader.num_in_flight_tokens
            is_ready = committed >= request.num_prompt_tokens
            return self.cache.fork(leader, request.num_prompt_tokens) if is_ready else None
        if request.params.prompt_logprobs is not None:
            return PrefixHit()  # every position's logits are wanted
        return self.cache.lookup(request)

    def _num_wanted(self, request: Request) -> int:
        """Tokens a request could compute now."""
        if request.num_output_tokens + request.num_in_flight_samples >= request.max_tokens:
            return 0  # the steps in flight must already reach its end
        ahead = request.num_tokens + request.num_output_placeholders + request.num_drafts
        return min(ahead, self.limits.max_model_len - 1) - request.num_computed_tokens

    def _chunk(self, draft: _Draft, wanted: int) -> int:
        """How many of the wanted tokens the budget grants; 0 passes the request over."""
        granted = min(wanted, draft.budget)
        if wanted <= self.limits.long_threshold:
            return granted
        if draft.long_budget is None:
            draft.long_budget = self._long_budget(draft)
        return min(granted, draft.long_budget)

    def _long_budget(self, draft: _Draft) -> int:
        """The long requests' share: half the budget, and what the short ones leave of the other half."""
        budget = self.limits.max_num_batched_tokens
        short = budget - draft.budget  # granted so far, all to short ones
        waiting = islice(self.waiting, len(self._free_slots))
        for request in chain((request for request in self.running if request not in draft.rows), waiting):
            wanted = self._num_wanted(request)
            if wanted <= self.limits.long_threshold:
                short += wanted
            if short >= budget - budget // 2:
                break
        return max(budget // 2, budget - short)

    def _make_room(self, draft: _Draft, request: Request, num_tokens: int) -> bool:
        """Allocates, preempting others until it works or the request itself is the victim."""
        while not self.cache.allocate(request, num_tokens):
            victim = self._pick_victim()
            self._preempt(draft, victim)
            if victim is request:
                return False
        return True

    def _pick_victim(self) -> Request:
        if self.limits.policy == "priority":
            return max(self.running, key=lambda request: (request.priority, request.arrival))
        return next(reversed(self.running))

    def _preempt(self, draft: _Draft, victim: Request) -> None:
        """Sends a running request back to the queue; a victim that is already in the plan leaves it."""
        self._drop_row(draft, victim)
        self._leave(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed_tokens = 0
        victim.num_output_placeholders = 0
        victim.num_drafts = 0
        victim.epoch += 1
        self.waiting.add_preempted(victim)
        self.num_preemptions += 1
        draft.num_preempted += 1

    def _leave(self, request: Request, *, is_broken: bool = False) -> None:
        """Takes a request out of the running ones; its committed content stays reusable unless it is broken."""
        del self.running[request]
        if is_broken:
            self.cache.discard(request)
        else:
            self.cache.free(request, request.num_computed_tokens - request.num_in_flight_tokens)
        self._free_slots.append(request.slot)
        request.slot = -1

    def _add_row(
        self,
        draft: _Draft,
        request: Request,
        num_tokens: int,
        *,
        first_new_block: int = 0,
        is_admission: bool = False,
    ) -> None:
        self._spend(draft, request, num_tokens)
        draft.rows[request] = PlanRow(
            request=request,
            slot=request.slot,
            epoch=request.epoch,
            start=request.num_computed_tokens,
            num_tokens=num_tokens,
            is_admission=is_admission,
            first_new_block=first_new_block,
        )

    def _drop_row(self, draft: _Draft, victim: Request) -> None:
        row = draft.rows.pop(victim, None)
        if row is not None:
            self._spend(draft, victim, -row.num_tokens)

    def _spend(self, draft: _Draft, request: Request, num_tokens: int) -> None:
        draft.budget -= num_tokens
        if draft.long_budget is not None and self._num_wanted(request) > self.limits.long_threshold:
            draft.long_budget -= num_tokens

    @staticmethod
    def _samples(row: PlanRow, num_known: int) -> bool:
        """A row samples iff it computes the last token there is, known or to come (counters already raised)."""
        return row.request.num_computed_tokens >= num_known

    def _finalise(self, draft: _Draft) -> StepPlan:
        """Applies the counters of the rows that stayed, and puts single-token rows first."""
        for request, row in draft.rows.items():
            known = request.num_tokens + request.num_output_placeholders
            request.num_computed_tokens += row.num_tokens
            request.num_in_flight_tokens += row.num_tokens
            row.samples = self._samples(row, known)
            if row.samples:
                row.num_drafts = request.num_computed_tokens - known
                request.num_output_placeholders += 1 + row.num_drafts
                request.num_in_flight_samples += 1
        singles = [row for row in draft.rows.values() if row.num_tokens == 1]
        longer = [row for row in draft.rows.values() if row.num_tokens > 1]
        num_tokens = self.limits.max_num_batched_tokens - draft.budget
        return StepPlan([*singles, *longer], len(singles), num_tokens, draft.copies, draft.num_preempted)

    # -- results ----------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[Emission]:
        """Takes a step's tokens: appends them, checks for stops, registers what is surely written.

        Late output of a request that was preempted meanwhile is delivered but changes no counter; that of a
        finished one is dropped.
        """
        emissions = []
        for number, (row, tokens) in enumerate(zip(plan.rows, result.token_ids, strict=True)):
            request = row.request
            request.num_in_flight_tokens -= row.num_tokens
            request.num_in_flight_samples -= row.samples
            if request.is_finished:
                continue
            if tokens is None:
                self.finish(request, FinishReason.ERROR)
                emissions.append(Emission(request, [], number))
                continue
            if row.epoch == request.epoch:
                self._settle(row, len(tokens))
            reason = self._append(request, tokens, emissions, number)
            if row.epoch == request.epoch:
                self._register(row)
            if reason is not None:
                self.finish(request, reason)
        return emissions

    @staticmethod
    def _settle(row: PlanRow, num_emitted: int) -> None:
        """Turns a row's placeholders into tokens; rejected drafts were never computed."""
        if not row.samples:
            return
        request = row.request
        if row.num_drafts:
            num_rejected = row.num_drafts - (num_emitted - 1)
            request.num_computed_tokens -= num_rejected
            request.num_output_placeholders -= num_rejected
        request.num_output_placeholders -= num_emitted

    def _append(
        self, request: Request, tokens: Iterable[int], emissions: list[Emission], number: int
    ) -> FinishReason | None:
        accepted: list[int] = []
        reason = None
        for token in tokens:
            request.token_ids.append(token)
            accepted.append(token)
            reason = self._check_stop(request)
            if reason is not None:
                break
        if accepted:
            emissions.append(Emission(request, accepted, number))
        return reason

    def _register(self, row: PlanRow) -> None:
        request = row.request
        committed = request.num_computed_tokens - request.num_in_flight_tokens
        ends_prompt = row.start < request.num_prompt_tokens <= committed
        self.cache.commit(request, committed, with_tail=ends_prompt)
