"""A NumPy device that checks content: every KV slot stores (position, token), and the next token is a hash of what
was *read* through the block table. A wrong slot, a lost write or a reused block changes the tokens that follow.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxinfer.cache import KVCacheManager, PrefixIndex
from jaxinfer.core import FinishReason, PlanRow, Request, RequestStatus, SamplingParams, StepPlan, StepResult
from jaxinfer.scheduler import Commit, Scheduler, SchedulerLimits, resolve_max_tokens

VOCAB = 40
EOS = 7


def next_token(content: np.ndarray) -> int:
    """The "model": a hash of the (position, token) pairs read, an int32 array [n, 2]."""
    return zlib.crc32(np.ascontiguousarray(content, np.int32).tobytes()) % VOCAB


def solo_run(prompt: Sequence[int], max_tokens: int) -> list[int]:
    """What a request alone gives: no cache, no batch, no scheduler."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(np.stack([np.arange(len(tokens)), tokens], axis=1)))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


@dataclass
class Device:
    """Executes plans in stream order, at dispatch; only the host's knowledge of results is late."""

    num_blocks: int
    block_size: int
    num_slots: int
    num_drafts: int
    rng: random.Random
    num_groups: int = 1
    has_late_tokens: bool = False

    def __post_init__(self) -> None:
        self.kv = np.full((self.num_blocks * self.block_size, 2), -1, np.int32)
        self.committed = self.kv.copy()  # what is surely written: the writes of committed plans only
        self.writes: deque[list[tuple[np.ndarray, np.ndarray]]] = deque()
        self.last_token = [0] * self.num_slots
        self.fed = [0] * self.num_slots  # last tokens as a pipeline's first stage knows them
        self.returning: dict[int, dict[int, int]] = {}  # group -> slot -> token: on the way to the first stage
        self.num_computed = [0] * self.num_slots
        self.drafts: list[list[int]] = [[] for _ in range(self.num_slots)]

    def run(self, plan: StepPlan) -> StepResult:
        self.writes.append([])
        for slot, token in self.returning.pop(plan.group, {}).items():
            self.fed[slot] = token
        assert all(row.slot % self.num_groups == plan.group for row in plan.rows), "a row of another group"
        within = np.arange(self.block_size)
        sources = [source * self.block_size + within for source, _ in plan.copies]
        contents = [self.kv[slots].copy() for slots in sources]
        for (_, target), content in zip(plan.copies, contents, strict=True):
            self._write(target * self.block_size + within, content)
        emitted = [self._run_row(row) for row in plan.rows]
        self.returning[plan.group] = {row.slot: self.last_token[row.slot] for row in plan.rows if row.samples}
        num_decodes = len(plan.decodes)
        tokens = np.array([tokens[0] for tokens in emitted[:num_decodes]], np.int64)
        return StepResult(emitted[num_decodes:], decode_token_ids=tokens)

    def commit(self, index: PrefixIndex) -> None:
        """The oldest plan's writes are now known to have happened; every registered token must be among them."""
        for slots, content in self.writes.popleft():
            self.committed[slots] = content
        for block, (_, tokens) in index._entries.items():
            held = self.committed[block * self.block_size :][: len(tokens), 1]
            assert held.tolist() == list(tokens), f"block {block} is registered with tokens not yet committed"

    def _write(self, slots: np.ndarray, content: np.ndarray) -> None:
        self.kv[slots] = content
        self.writes[-1].append((slots, content))

    def _run_row(self, row) -> list[int]:
        request, slot = row.request, row.slot
        if row.is_admission:
            self.num_computed[slot] = row.start
            self.drafts[slot] = []  # what is there is the former owner's
        known = request.token_ids[row.start : row.start + row.num_tokens]
        assert known or not self.has_late_tokens, "the first stage does not have this token"
        tokens = known if known else [self.fed[slot]]
        tokens = tokens + self.drafts[slot][: row.num_tokens - len(tokens)]
        assert len(tokens) == row.num_tokens, "the plan refers to tokens nobody has"
        start = self.num_computed[slot]
        table = np.array(request.block_ids)
        positions = np.arange(start, start + len(tokens))
        self._write(self._slots(table, positions), np.stack([positions, tokens], axis=1))
        num_emitted = 0
        emitted = []
        if row.samples:
            for i in range(len(tokens) - row.num_drafts - 1, len(tokens)):
                emitted.append(next_token(self.kv[self._slots(table, np.arange(start + i + 1))]))
                num_emitted += 1
                if i + 1 < len(tokens) and tokens[i + 1] != emitted[-1]:
                    break
            self.last_token[slot] = emitted[-1]
            self.num_computed[slot] = start + len(tokens) - row.num_drafts - 1 + num_emitted
            self._propose(slot, table)
        else:
            self.num_computed[slot] = start + len(tokens)
        return emitted

    def _slots(self, table: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return table[positions // self.block_size] * self.block_size + positions % self.block_size

    def _propose(self, slot: int, table: np.ndarray) -> None:
        """Guesses that are right about half of the time."""
        content = self.kv[self._slots(table, np.arange(self.num_computed[slot]))].tolist()
        token, guesses = self.last_token[slot], []
        for _ in range(self.num_drafts):
            content.append([len(content), token])
            token = next_token(np.array(content))
            if self.rng.random() < 0.4:
                token = self.rng.randrange(VOCAB)
            guesses.append(token)
        self.drafts[slot] = guesses


@dataclass
class Traffic:
    """Random requests against a scheduler and a `Device`; `run` asserts everything that must hold."""

    seed: int
    depth: int = 1
    num_drafts: int = 0
    caching: bool = True
    policy: str = "fcfs"
    abort_rate: float = 0.02
    num_blocks: int = 14
    block_size: int = 4
    max_num_seqs: int = 4
    budget: int = 12
    scheduler_class: type[Scheduler] = Scheduler
    num_groups: int = 1
    has_late_tokens: bool = False

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.cache = KVCacheManager(self.num_blocks, self.block_size, enable_prefix_caching=self.caching)
        self.max_model_len = (self.num_blocks - 1) * self.block_size
        limits = SchedulerLimits(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_model_len=self.max_model_len,
            policy=self.policy,
            num_groups=self.num_groups,
            has_late_tokens=self.has_late_tokens,
        )
        self.scheduler = self.scheduler_class(limits, self.cache)
        sizes = (self.num_blocks, self.block_size, self.max_num_seqs)
        self.device = Device(*sizes, self.num_drafts, self.rng, self.num_groups, self.has_late_tokens)
        self.families = [[self.rng.randrange(VOCAB) for _ in range(40)] for _ in range(3)]
        self.requests: list[Request] = []
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.told: Counter[Request] = Counter()
        self.seen = {"preempted": 0, "hits": 0, "copies": 0, "mixed": 0, "stale": 0, "forks": 0, "columns": 0}

    def submit(self) -> Request:
        family = self.rng.choice(self.families)
        prompt = family[: self.rng.randrange(0, 30)] + [
            self.rng.randrange(VOCAB) for _ in range(self.rng.randrange(1, 8))
        ]
        prompt = prompt[-(self.max_model_len - 1) :]
        params = SamplingParams(max_tokens=self.rng.randrange(1, 24), temperature=0.0)
        request = Request(
            request_id=str(len(self.requests)),
            prompt_token_ids=prompt,
            params=params,
            max_tokens=resolve_max_tokens(len(prompt), params, self.max_model_len),
            arrival=len(self.requests),
            priority=self.rng.randrange(3) if self.policy == "priority" else 0,
            cache_salt=self.rng.choice(["", "", "salt"]),
            eos_token_ids=frozenset({EOS, *range(VOCAB, VOCAB + len(self.requests) % 7)}),
            is_watched=len(self.requests) % 5 == 0,
        )
        siblings = [self._sibling(request, number) for number in range(1, self.rng.choice([1, 1, 1, 4]))]
        for one in [request, *siblings]:
            self.requests.append(one)
            self.scheduler.add(one)
        return request

    def _sibling(self, leader: Request, number: int) -> Request:
        """One of the n answers to the leader's prompt. (This device knows no seeds: all n are the same.)"""
        return Request(
            request_id=f"{leader.request_id}-{number}",
            prompt_token_ids=leader.prompt_token_ids,
            params=leader.params,
            max_tokens=self.rng.randrange(1, leader.max_tokens + 1),
            arrival=leader.arrival + number,
            priority=leader.priority,
            cache_salt=leader.cache_salt,
            eos_token_ids=leader.eos_token_ids,
            leader=leader,
            is_watched=number == 2,
        )

    def step(self) -> None:
        forks = {request: request.leader for request in self.scheduler.waiting if request.leader is not None}
        if len(self.in_flight) < self.depth:
            plan = self.scheduler.schedule()
            self._check_plan(plan)
            for row in plan.rows:
                is_fork = self._is_fork(row, forks.get(row.request))
                self.seen["forks"] += is_fork
                self.seen["hits"] += row.is_admission and row.start > 0 and not is_fork
            if not plan.is_empty:
                self.in_flight.append((plan, self.device.run(plan)))
                for row in plan.rows:
                    if row.samples:
                        row.request.num_drafts = self.num_drafts
            elif not self.in_flight:
                assert not self.scheduler.has_work, "nothing to do, yet requests wait"
        if self.in_flight and (len(self.in_flight) >= self.depth or self.rng.random() < 0.2):
            self.commit()

    def commit(self) -> None:
        plan, result = self.in_flight.popleft()
        self.seen["stale"] += sum(row.tenure != row.request.tenure and not row.request.is_finished for row in plan.rows)
        self._check_commit(self.scheduler.commit(plan, result))
        self.device.commit(self.cache.index)
        self.scheduler.check_integrity()

    def _check_plan(self, plan: StepPlan) -> None:
        assert plan.num_tokens == sum(row.num_tokens for row in plan.rows) <= self.budget
        assert len(plan.rows) <= self.max_num_seqs
        assert all((row.num_tokens == 1) == (n < plan.num_decodes) for n, row in enumerate(plan.rows))
        self.seen["preempted"] += plan.num_preempted
        self.seen["copies"] += len(plan.copies)
        self.seen["columns"] += len(plan.decodes)
        self.seen["mixed"] += 0 < plan.num_decodes < len(plan.rows)

    def _check_commit(self, commit: Commit) -> None:
        """Each token is told once, and of those that are watched or that end, by an emission."""
        assert not any(request.is_watched or request.is_finished for request in commit.quiet)
        for request in commit.quiet:
            self.told[request] += 1
        for emission in commit.emissions:
            self.told[emission.request] += len(emission.token_ids)
            assert emission.request.token_ids[-len(emission.token_ids) :] == emission.token_ids

    @staticmethod
    def _is_fork(row: PlanRow, leader: Request | None) -> bool:
        has_leader = leader is not None and leader.status is RequestStatus.RUNNING
        return row.is_admission and has_leader and row.start == row.request.num_prompt_tokens - 1 > 0

    def run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            if self.rng.random() < 0.35 and len(self.scheduler.waiting) < 8:
                self.submit()
            if self.rng.random() < self.abort_rate and self.scheduler.has_work:
                victim = self.rng.choice(list(self.scheduler.live_requests()))
                self.scheduler.finish(victim, FinishReason.ABORT)
                self.scheduler.check_integrity()
            self.step()
        self.drain()
        self.check_answers()

    def drain(self, limit: int = 20_000) -> None:
        for _ in range(limit):
            if not self.in_flight and not self.scheduler.has_work:
                break
            self.step()
        else:
            raise AssertionError("the queue does not move")
        assert self.cache.pool.num_used == 0
        for request in self.requests:
            assert request.is_finished
            assert request.num_in_flight_tokens == request.num_in_flight_samples == 0
            assert request.num_output_placeholders == 0

    def check_answers(self) -> None:
        for request in self.requests:
            expected = solo_run(request.prompt_token_ids, request.max_tokens)
            output = request.output_token_ids
            assert self.told[request] == len(output)
            if request.finish_reason is FinishReason.ABORT:
                assert output == expected[: len(output)]
                continue
            assert output == expected
            is_eos = output[-1] == EOS
            assert request.finish_reason is (FinishReason.STOP if is_eos else FinishReason.LENGTH)
