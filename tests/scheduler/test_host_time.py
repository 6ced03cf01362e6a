"""What a decode step costs the host: planned, packed, committed and delivered, over up to 1,024 running requests.

    make bench-scheduler

prints times over many steps, in each of which every request decodes one token. With `--benchmark-disable`, as in
`make test`, each test is one step. No device is needed; the garbage collector stays on, as in an engine.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest

from jaxinfer.batch import BatchLayout, BatchShape
from jaxinfer.cache import KVCacheManager
from jaxinfer.core import Request, SamplingParams, StepPlan, StepResult
from jaxinfer.engine.inputs import pack
from jaxinfer.engine.state import Answer, RequestState, deliver
from jaxinfer.scheduler import Commit, Scheduler, SchedulerLimits

MAX_MODEL_LEN = 4096
BLOCK_SIZE = 64
DEPTH = 2
TOKEN = 7
ROUNDS = 300


class Host:
    """An engine's host side over a device that answers at once, and always the same; `num_running` rows decode."""

    def __init__(self, num_running: int) -> None:
        limits = SchedulerLimits(
            max_num_seqs=num_running, max_num_batched_tokens=max(8192, num_running), max_model_len=MAX_MODEL_LEN
        )
        cache = KVCacheManager(num_running * MAX_MODEL_LEN // BLOCK_SIZE + 1, BLOCK_SIZE)
        self.live: dict[Request, tuple[RequestState, Answer]] = {}
        self.scheduler = Scheduler(limits, cache, lambda request: self.live[request][1].check_stop())
        self.layout = BatchLayout(BatchShape(num_running, num_running, True, BLOCK_SIZE))
        self.num_running = num_running
        self.in_flight: deque[StepPlan] = deque()
        rng = random.Random(0)
        for number in range(num_running):
            self._submit(number, [rng.randrange(1000) for _ in range(rng.randrange(1, 2 * BLOCK_SIZE))])
        while not self._is_steady():
            self.scheduler.commit(*answer(self.scheduler.schedule()))
        while len(self.in_flight) < DEPTH:
            self.plan_and_pack()

    def _submit(self, number: int, prompt: list[int]) -> None:
        request = Request(
            request_id=str(number),
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=None),
            max_tokens=MAX_MODEL_LEN - len(prompt),
            arrival=number,
            eos_token_ids=frozenset({TOKEN + 1, TOKEN + 2}),
        )
        state = RequestState([request], None, None)
        self.live[request] = state, state.answers[0]
        self.scheduler.add(request)

    def _is_steady(self) -> bool:
        return len(self.scheduler.running) == self.num_running and all(
            request.num_output_tokens > 0 for request in self.live
        )

    def plan_and_pack(self) -> np.ndarray:
        """Another step in flight; its buffer."""
        plan = self.scheduler.schedule()
        self.in_flight.append(plan)
        return pack(plan, self.layout, self.num_running)

    def commit_and_deliver(self) -> Commit:
        """The oldest step in flight has its tokens."""
        commit = self.scheduler.commit(*answer(self.in_flight.popleft()))
        deliver(commit, None, self.live, lambda answer: None)
        return commit


def answer(plan: StepPlan) -> tuple[StepPlan, StepResult]:
    tokens = np.full(len(plan.decodes), TOKEN, np.int32)
    return plan, StepResult([[TOKEN] if row.samples else [] for row in plan.others], decode_token_ids=tokens)


@pytest.fixture(params=[1, 32, 256, 1024], scope="module")
def host(request):
    return Host(request.param)


def test_plan_and_pack(host, benchmark):
    """A row of one token for each request, all as columns where there are many; the token is still on the device."""

    def make_room() -> None:
        host.commit_and_deliver()

    before = {request: request.num_tokens for request in host.live}
    buffer = benchmark.pedantic(host.plan_and_pack, setup=make_room, rounds=ROUNDS)
    plan, count = host.in_flight[-1], host.num_running
    assert len(host.in_flight) == DEPTH
    assert plan.num_rows == plan.num_decodes == plan.num_tokens == count
    assert len(plan.decodes) == (count if count >= Scheduler.MIN_COLUMN_ROWS else 0)
    grown = {request.num_tokens - length for request, length in before.items()}
    assert grown in ({1}, {ROUNDS})
    part = {name: buffer[where] for name, where in host.layout.slices.items()}
    np.testing.assert_array_equal(part["query_start_loc"], np.arange(count + 1))
    np.testing.assert_array_equal(part["token_rows"], np.arange(count))
    np.testing.assert_array_equal(part["slot_ids"], [row.request.slot for row in plan.rows])
    assert {row.request for row in plan.rows} == set(host.live)
    for name, value in {"samples": 1, "from_carry": 1, "token_ids": 0, "num_decodes": count}.items():
        assert (part[name] == value).all(), name
    updates = zip(part["update_slots"], part["update_columns"], part["update_blocks"], strict=True)
    assert sorted(update for update in updates if update[0] < count) == sorted(
        (row.slot, row.start // BLOCK_SIZE, row.request.block_ids[row.start // BLOCK_SIZE])
        for row in plan.rows
        if row.start % BLOCK_SIZE == 0
    )


def test_commit_and_deliver(host, benchmark):
    """One token for each request; nobody looks at it, so none is told one by one."""

    def plan_more() -> None:
        host.plan_and_pack()

    host.commit_and_deliver()
    before = {request: request.num_tokens for request in host.live}
    commit = benchmark.pedantic(host.commit_and_deliver, setup=plan_more, rounds=ROUNDS)
    grown = {request.num_tokens - length for request, length in before.items()}
    assert grown in ({1}, {ROUNDS})
    assert {request.token_ids[-1] for request in host.live} == {TOKEN}
    assert set(commit.quiet) | {emission.request for emission in commit.emissions} == set(host.live)
    assert not any(request.is_finished for request in host.live)
    host.scheduler.check_integrity()
    host.plan_and_pack()
