"""The scheduler: a token budget, no prefill phase and no decode phase.

`num_computed_tokens` chases `num_tokens`. With steps in flight a request has three kinds of tokens:

      position:  0 ............ num_tokens ...... + placeholders ... + drafts
                 |  known to the host |  sampled by steps   |  guesses to
                 |                    |  not yet returned   |  verify
      computed:  |<------ num_computed_tokens ------------->|
                              |<-- num_in_flight_tokens --->|   scheduled, not committed

The names and the admission order follow vLLM's v1 scheduler; the counters are those of the project's simulation:
`schedule` raises them, `commit` corrects them, a preemption resets them and makes what is in flight stale.

There are two ways through a step. One goes request by request, and says what the rules are. The other is for the many
that are steady: one token a step, nothing special. It plans and settles them as columns (`running.py`, `steady.py`)
and goes to a single request only where something happens: a new block, a chunk of a prompt, an end. It is taken where
many run. Both give the same plans (tests/scheduler/test_steady.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, compress

import numpy as np

from jaxinfer.cache import KVCacheManager, PrefixHit
from jaxinfer.core import DecodeRows, FinishReason, PlanRow, Request, RequestStatus, StepPlan, StepResult
from jaxinfer.scheduler.draft import Draft
from jaxinfer.scheduler.limits import SchedulerLimits
from jaxinfer.scheduler.queue import make_queue
from jaxinfer.scheduler.results import Commit, Emission, StopCheck, check_token_stop
from jaxinfer.scheduler.running import NEEDS_FULL_SAMPLER, USES_CUTS, WANTS_LOGPROBS, RunningTable
from jaxinfer.scheduler.steady import SteadyRows


class Scheduler:
    """Plans steps over running and waiting requests and commits their results.

    Args:
      limits: budget, rows, lengths, policy.
      cache: the blocks.
      check_stop: says whether a request ends with the token just appended. Called for every token of requests that
        are watched, and otherwise where a token is an end id or the last that is allowed.
    """

    MIN_COLUMN_ROWS = 8
    """With fewer steady requests, going through them costs less than operations on columns."""

    def __init__(
        self, limits: SchedulerLimits, cache: KVCacheManager, check_stop: StopCheck = check_token_stop
    ) -> None:
        if limits.max_model_len > cache.num_usable_tokens:
            raise ValueError(
                f"max_model_len {limits.max_model_len} is beyond the cache's {cache.num_usable_tokens} tokens"
            )
        self.limits = limits
        self.cache = cache
        self.running = RunningTable(limits.max_num_seqs, cache.block_size, limits.num_groups)
        self.waiting = make_queue(limits.policy)
        self.num_preemptions = 0
        self._check_stop = check_stop
        self._turn = 0  # the group that is asked first

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
        self.running.check_integrity()
        assert all(request.slot == -1 and not request.block_ids for request in self.waiting)

    # -- planning ---------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plans the next step: running requests in order, then waiting ones while rows and budget last.

        With several groups it is a step of the next one that has something to do.
        """
        plan = StepPlan()
        for _ in range(self.limits.num_groups):
            group, self._turn = self._turn, (self._turn + 1) % self.limits.num_groups
            if self.limits.has_late_tokens and self.running.in_flight[self.running.slots_of(group)].any():
                continue
            draft = Draft(self.limits, self.running, self.waiting, group)
            self._schedule_running(draft)
            if not draft.num_preempted:
                self._schedule_waiting(draft)
            plan = self._finalise(draft)
            if not plan.is_empty:
                break
        return plan

    def _schedule_running(self, draft: Draft) -> None:
        draft.steady = self._find_steady(draft.group)
        if draft.steady is not None:
            self._schedule_visits(draft, draft.steady)
            return
        for slot in self.running.slots_of(draft.group).tolist():
            if draft.budget == 0:
                break
            request = self.running.owners[slot]
            if request is not None:  # not preempted for one before it
                self._schedule_one(draft, request)

    def _find_steady(self, group: int) -> SteadyRows | None:
        """The steady requests, or None where each is better looked at: they are few, or any might be preempted."""
        if len(self.running) < self.MIN_COLUMN_ROWS:
            return None
        steady = SteadyRows(self.running, self.limits.max_model_len, group)
        if steady.num_steady < self.MIN_COLUMN_ROWS:
            return None
        if self.limits.policy == "priority":
            most_blocks = steady.most_blocks(self.limits.max_num_batched_tokens, self.cache.block_size)
            if most_blocks > self.cache.pool.num_free:
                return None
        return steady

    def _schedule_visits(self, draft: Draft, steady: SteadyRows) -> None:
        """What going through all running requests gives, going only to those that need more than a token."""
        for slot, is_steady, num_ahead in steady.visits():
            request = self.running.owners[slot]
            if request is None:
                break  # preempted for one before it, as are all behind it
            draft.grant_steady(steady, num_ahead)
            if draft.budget == 0:
                return
            if not is_steady:
                self._schedule_one(draft, request)
            elif self._make_room(draft, request, request.num_computed_tokens + 1):
                steady.new_blocks.append((slot, len(request.block_ids) - 1, request.block_ids[-1]))
        draft.grant_steady(steady, steady.num_steady)

    def _schedule_one(self, draft: Draft, request: Request) -> None:
        num_tokens = draft.chunk(draft.num_wanted(request))
        if num_tokens == 0:
            return
        first_new_block = len(request.block_ids)
        if self._make_room(draft, request, request.num_computed_tokens + num_tokens):
            draft.add(request, num_tokens, first_new_block=first_new_block)

    def _schedule_waiting(self, draft: Draft) -> None:
        admitted: list[Request] = []
        room = min(self.running.num_free_slots(draft.group), self._num_missing(draft.group))
        for request in self.waiting:
            if draft.budget == 0 or len(admitted) == room:
                break
            hit = self._find_hit(request)
            if hit is None:
                continue
            num_tokens = draft.chunk(request.num_tokens - hit.num_tokens)
            if num_tokens == 0:
                continue
            copies = self.cache.admit(request, hit, hit.num_tokens + num_tokens)
            if copies is None:
                break
            admitted.append(request)
            draft.copies.extend(copies)
            self.running.add(request, draft.group)
            request.leader = None
            request.num_computed_tokens = hit.num_tokens
            if request.num_cached_tokens < 0:
                request.num_cached_tokens = hit.num_tokens
            draft.add(request, num_tokens, is_admission=True)
        for request in admitted:
            self.waiting.remove(request)
            request.status = RequestStatus.RUNNING

    def _num_missing(self, group: int) -> int:
        """Requests that a group lacks of its share of all that live, so that no group has much more than another."""
        num_groups = self.limits.num_groups
        if num_groups == 1:
            return len(self.waiting)
        share = -(-(len(self.running) + len(self.waiting)) // num_groups)
        return max(share - len(self.running.slots_of(group)), 0)

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

    def _make_room(self, draft: Draft, request: Request, num_tokens: int) -> bool:
        """Allocates, preempting others until it works or the request itself is the victim."""
        while not self._allocate(request, num_tokens):
            victim = self._pick_victim()
            self._preempt(draft, victim)
            if victim is request:
                return False
        return True

    def _allocate(self, request: Request, num_tokens: int) -> bool:
        num_blocks = len(request.block_ids)
        if not self.cache.allocate(request, num_tokens):
            return False
        if len(request.block_ids) > num_blocks:
            self.running.note_blocks(request)
        return True

    def _pick_victim(self) -> Request:
        if self.limits.policy == "priority":
            return max(self.running, key=lambda request: (request.priority, request.arrival))
        return self.running.last

    def _preempt(self, draft: Draft, victim: Request) -> None:
        """Sends a running request back to the queue; a victim that is already in the plan leaves it."""
        draft.drop(victim)
        if draft.steady is not None:
            assert victim is self.running.last, "blocks were counted wrongly"
            draft.steady.drop_last(victim)
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
        if is_broken:
            self.cache.discard(request)
        else:
            self.cache.free(request, request.num_computed_tokens - request.num_in_flight_tokens)
        self.running.remove(request)

    @staticmethod
    def _samples(row: PlanRow, num_known: int) -> bool:
        """A row samples iff it computes the last token there is, known or to come (counters already raised)."""
        return row.request.num_computed_tokens >= num_known

    def _finalise(self, draft: Draft) -> StepPlan:
        """Applies the counters of the rows that stayed, and puts single-token rows first."""
        decodes = draft.steady.make_rows() if draft.steady is not None else DecodeRows()
        flags = int(np.bitwise_or.reduce(self.running.flags[decodes.slots])) if decodes else 0
        for request, row in draft.rows.items():
            known = request.num_tokens + request.num_output_placeholders
            request.num_computed_tokens += row.num_tokens
            request.num_in_flight_tokens += row.num_tokens
            row.samples = self._samples(row, known)
            if row.samples:
                row.num_drafts = request.num_computed_tokens - known
                request.num_output_placeholders += 1 + row.num_drafts
                request.num_in_flight_samples += 1
                flags |= int(self.running.flags[row.slot])
        singles = [row for row in draft.rows.values() if row.num_tokens == 1]
        longer = [row for row in draft.rows.values() if row.num_tokens > 1]
        return StepPlan(
            others=[*singles, *longer],
            num_decodes=len(decodes) + len(singles),
            num_tokens=self.limits.max_num_batched_tokens - draft.budget,
            copies=draft.copies,
            num_preempted=draft.num_preempted,
            decodes=decodes,
            needs_full_sampler=flags & NEEDS_FULL_SAMPLER != 0,
            uses_cuts=flags & USES_CUTS != 0,
            wants_logprobs=flags & WANTS_LOGPROBS != 0,
            group=draft.group,
        )

    # -- results ----------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> Commit:
        """Takes a step's tokens: appends them, checks for stops, registers what is surely written.

        Late output of a request that was preempted meanwhile is delivered but changes no counter; that of a
        finished one is dropped.
        """
        commit = Commit()
        if plan.decodes:
            self._commit_decodes(plan.decodes, result.decode_token_ids, commit)
        for number, (row, tokens) in enumerate(zip(plan.others, result.token_ids, strict=True), len(plan.decodes)):
            self._commit_row(row, tokens, number, commit)
        for request, reason in sorted(commit.ends, key=lambda end: end[0].tenure):  # in order of admission
            self.finish(request, reason)
        return commit

    def _commit_decodes(self, rows: DecodeRows, tokens: np.ndarray, commit: Commit) -> None:
        """Settles as columns the rows whose request still has its slot, and goes to those where something happens."""
        running, requests, slots = self.running, rows.requests, rows.slots
        numbers = range(len(rows))
        is_current = (running.tenures[slots] == rows.tenures) & (tokens >= 0)
        if not is_current.all():
            for number in np.flatnonzero(~is_current).tolist():
                token = int(tokens[number])
                self._commit_row(rows.row(number), [token] if token >= 0 else None, number, commit)
            numbers, slots, tokens = np.flatnonzero(is_current).tolist(), slots[is_current], tokens[is_current]
            requests = list(compress(requests, is_current.tobytes()))
        for request, token in zip(requests, tokens.tolist(), strict=True):
            request.token_ids.append(token)
        running.settle(slots, tokens)
        is_emitted = running.may_end(slots)
        committed = running.find_committed()[slots]
        fills_block = committed % self.cache.block_size == 0
        commit.quiet += compress(requests, (~is_emitted).tobytes())
        for at in np.flatnonzero(fills_block).tolist():
            self.cache.commit(requests[at], int(committed[at]))
        for at in np.flatnonzero(is_emitted).tolist():
            request = requests[at]
            commit.emissions.append(Emission(request, request.token_ids[-1:], numbers[at]))
            commit.note_end(request, self._check_stop(request))

    def _commit_row(self, row: PlanRow, tokens: list[int] | None, number: int, commit: Commit) -> None:
        request = row.request
        request.num_in_flight_tokens -= row.num_tokens
        request.num_in_flight_samples -= row.samples
        if request.is_finished:
            return
        if tokens is None:
            commit.emissions.append(Emission(request, [], number))
            commit.note_end(request, FinishReason.ERROR)
            return
        is_current = row.tenure == request.tenure
        if is_current:
            self._settle(row, len(tokens))
        accepted, reason = self._append(request, tokens)
        if accepted:
            commit.emissions.append(Emission(request, accepted, number))
        if is_current:
            self._register(row)
        commit.note_end(request, reason)

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

    def _append(self, request: Request, tokens: Iterable[int]) -> tuple[list[int], FinishReason | None]:
        """Appends tokens until one ends the request: those appended, and the reason."""
        accepted: list[int] = []
        reason = None
        for token in tokens:
            request.token_ids.append(token)
            accepted.append(token)
            reason = self._check_stop(request)
            if reason is not None:
                break
        if accepted and request.slot >= 0:
            self.running.note_tokens(request)
        return accepted, reason

    def _register(self, row: PlanRow) -> None:
        request = row.request
        committed = request.num_computed_tokens - request.num_in_flight_tokens
        ends_prompt = row.start < request.num_prompt_tokens <= committed
        self.cache.commit(request, committed, with_tail=ends_prompt)
