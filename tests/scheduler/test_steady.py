"""Planning and settling by columns: the same plans as request by request, the right tokens, controls that must fail."""

from __future__ import annotations

import random

import numpy as np
import pytest
from content_device import EOS, Traffic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.batch import BatchLayout, BatchShape
from jaxinfer.cache import KVCacheManager
from jaxinfer.core import FinishReason, Request, SamplingParams, StepPlan, StepResult
from jaxinfer.engine.inputs import pack
from jaxinfer.scheduler import Scheduler, SchedulerLimits
from jaxinfer.scheduler.running import RunningTable
from jaxinfer.scheduler.steady import SteadyRows


class ByColumns(Scheduler):
    """Uses columns however few requests run."""

    MIN_COLUMN_ROWS = 1


class OneByOne(Scheduler):
    """Never uses them: the specification."""

    MIN_COLUMN_ROWS = 1 << 30


@st.composite
def shapes(draw):
    """Settings of a `Traffic`."""
    return {
        "seed": draw(st.integers(0, 2**32)),
        "depth": draw(st.sampled_from([1, 2, 3])),
        "num_drafts": draw(st.sampled_from([0, 0, 0, 1, 5])),
        "caching": draw(st.booleans()),
        "policy": draw(st.sampled_from(["fcfs", "priority"])),
        "num_blocks": draw(st.integers(12, 60)),
        "block_size": draw(st.sampled_from([1, 3, 4, 8])),
        "max_num_seqs": draw(st.sampled_from([3, 6, 10])),
        "budget": draw(st.integers(10, 40)),
    }


def run_traffic(shape, scheduler_class, num_steps=150) -> tuple[list, list, Traffic]:
    """(what each plan said, how each request went, the traffic)."""
    traffic = Traffic(**shape, scheduler_class=scheduler_class)
    plans = []
    check = traffic._check_plan

    def note(plan: StepPlan) -> None:
        check(plan)
        rows = [
            (row.request.request_id, row.slot, row.start, row.num_tokens, row.num_drafts, row.samples,
             row.is_admission, row.is_admission or row.request.block_ids[row.first_new_block :])
            for row in plan.rows
        ]  # fmt: skip
        plans.append((sorted(rows), plan.num_tokens, plan.num_decodes, plan.num_preempted, plan.copies))

    traffic._check_plan = note
    traffic.run(num_steps)
    ends = [(one.finish_reason, one.token_ids, one.epoch, one.num_cached_tokens) for one in traffic.requests]
    return plans, ends, traffic


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(shape=shapes())
def test_columns_give_the_plans_of_going_one_by_one(shape):
    """Rows, slots, blocks, chunks, preemptions and ends, step by step; the tokens are those of solo runs."""
    plans, ends, traffic = run_traffic(shape, ByColumns)
    wanted_plans, wanted_ends, other = run_traffic(shape, OneByOne)
    assert plans == wanted_plans
    assert ends == wanted_ends
    assert other.seen["columns"] == 0
    assert traffic.seen["columns"] > 0 or shape["num_drafts"]


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("num_blocks", [24, 80])
def test_long_traffic_gives_the_same_plans(depth, policy, num_blocks):
    shape = {
        "seed": depth,
        "depth": depth,
        "policy": policy,
        "num_blocks": num_blocks,
        "max_num_seqs": 12,
        "budget": 30,
    }
    plans, ends, traffic = run_traffic(shape, ByColumns, 2000)
    assert (plans, ends) == run_traffic(shape, OneByOne, 2000)[:2]
    assert traffic.seen["columns"] > 4000
    assert traffic.seen["preempted"] > 50 or num_blocks > 24


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_most_rows_are_columns_where_there_is_room(depth):
    traffic = Traffic(3, depth, num_blocks=300, max_num_seqs=24, budget=64)  # the default scheduler
    num_rows = 0
    check = traffic._check_plan

    def note(plan: StepPlan) -> None:
        nonlocal num_rows
        check(plan)
        num_rows += len(plan.rows)

    traffic._check_plan = note
    for _ in range(20):
        traffic.submit()
    traffic.drain()
    traffic.check_answers()
    assert traffic.seen["columns"] > num_rows / 2


@pytest.mark.parametrize("depth", [1, 2])
def test_columns_are_packed_as_their_rows_would_be(depth):
    """The buffer of a plan, and of one that has the same rows as objects; table updates in any order."""
    traffic = Traffic(5, depth, num_blocks=60, max_num_seqs=8, budget=24, scheduler_class=ByColumns)
    layout = BatchLayout(BatchShape(24, 8, False, traffic.block_size))
    check = traffic._check_plan

    def pack_fields(plan: StepPlan) -> dict[str, list]:
        buffer = pack(plan, layout, 8)
        fields = {name: buffer[where].tolist() for name, where in layout.slices.items()}
        names = ("update_slots", "update_columns", "update_blocks")
        updates = sorted(zip(*(fields.pop(name) for name in names), strict=True))
        return {**fields, "updates": updates}

    def pack_both(plan: StepPlan) -> None:
        check(plan)
        as_rows = StepPlan(plan.rows, num_decodes=plan.num_decodes, num_tokens=plan.num_tokens)
        assert pack_fields(plan) == pack_fields(as_rows)

    traffic._check_plan = pack_both
    traffic.run(150)
    assert traffic.seen["columns"] > 50


# -- controls ---------------------------------------------------------------------------------------


class KeepsPlaceholders(RunningTable):
    """A token that has come back keeps its placeholder."""

    def settle(self, slots, tokens):
        super().settle(slots, tokens)
        self.placeholders[slots] += 1


class IgnoresLength(RunningTable):
    """Only end ids are looked for."""

    def may_end(self, slots):
        return (self.end_ids == self.last_tokens).any(axis=0)[slots]


class IgnoresEndIds(RunningTable):
    def may_end(self, slots):
        return (self.num_tokens >= self.max_lens)[slots]


class TakesDraftsForSteady(RunningTable):
    def find_steady(self, wanted):
        return (wanted >= 1) & (self.computed >= self.prompt_lens)


class GoesOnAtTheEnd(RunningTable):
    """Steps in flight that must already reach the end are not counted."""

    def find_wanted(self, max_model_len):
        return self.num_tokens + self.placeholders + self.drafts - self.computed


class RegistersInFlight(RunningTable):
    def find_committed(self):
        return self.computed


class ForgetsBlocks(RunningTable):
    def note_blocks(self, request):
        pass


class ReusesTenures(RunningTable):
    """The next owner of a slot cannot be told from the last."""

    def add(self, request, group=0):
        self._num_tenures = 0
        super().add(request, group)


TABLES = [KeepsPlaceholders, IgnoresLength, IgnoresEndIds, TakesDraftsForSteady, GoesOnAtTheEnd,
        RegistersInFlight, ForgetsBlocks, ReusesTenures]  # fmt: skip


def goes_wrong(scheduler_class) -> bool:
    """With any of 24 shapes: tokens, counts or plans."""
    for seed in range(24):
        shape = {"seed": seed, "depth": 1 + seed % 3, "num_drafts": (0, 0, 1)[seed // 3 % 3], "budget": 12 + seed,
                 "num_blocks": (40, 14)[seed % 2], "max_num_seqs": 6,
                 "policy": ("fcfs", "priority")[seed // 2 % 2]}  # fmt: skip
        try:
            plans, ends, _ = run_traffic(shape, scheduler_class, 100)
            if (plans, ends) != run_traffic(shape, OneByOne, 100)[:2]:
                return True
        except (AssertionError, IndexError, ValueError):
            return True
    return False


@pytest.mark.parametrize("table", TABLES)
def test_wrong_columns_fail(table):
    class Wrong(ByColumns):
        def __init__(self, limits, cache, *rest):
            super().__init__(limits, cache, *rest)
            self.running = table(limits.max_num_seqs, cache.block_size)

    assert goes_wrong(Wrong)


def test_grants_beyond_the_budget_and_miscounted_blocks_fail(monkeypatch):
    assert not goes_wrong(ByColumns)
    with monkeypatch.context() as patch:
        patch.setattr(SteadyRows, "most_blocks", lambda self, budget, block_size: 0)
        assert goes_wrong(ByColumns)
    with monkeypatch.context() as patch:
        patch.setattr(SteadyRows, "grant", lambda self, num_ahead, budget: num_ahead - self.num_granted)
        assert goes_wrong(ByColumns)


# -- one by one -------------------------------------------------------------------------------------


class Steps:
    """Requests that run by columns, with tokens as the test says."""

    def __init__(self, *requests: Request) -> None:
        limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64)
        self.scheduler = ByColumns(limits, KVCacheManager(64, 4))
        for request in requests:
            self.scheduler.add(request)
        self.step(0)

    def step(self, *tokens: int):
        """Commits a step whose rows, in order of their requests, get these tokens."""
        plan = self.scheduler.schedule()
        others = [[tokens[0]] for _ in plan.others]
        decodes = np.array(tokens[: len(plan.decodes)], np.int64)
        commit = self.scheduler.commit(plan, StepResult(others, decode_token_ids=decodes))
        self.scheduler.check_integrity()
        return commit


def make(name: str = "r", max_tokens: int = 20, **fields) -> Request:
    params = SamplingParams(**fields.pop("params", {}))
    return Request(name, [1, 2, 3], params, max_tokens, **fields)


def test_who_is_quiet():
    plain, watched = make("plain", eos_token_ids=frozenset({EOS})), make("watched", is_watched=True)
    many = make("many", eos_token_ids=frozenset(range(100, 105)))  # more than the columns hold: always looked at
    steps = Steps(plain, watched, many)
    commit = steps.step(11, 12, 13)
    assert commit.quiet == [plain]
    assert [(one.request, one.token_ids, one.row) for one in commit.emissions] == [(watched, [12], 1), (many, [13], 2)]
    commit = steps.step(EOS, EOS, 104)
    assert commit.quiet == []
    assert [one.request for one in commit.emissions] == [plain, watched, many]
    assert (plain.finish_reason, watched.finish_reason, many.finish_reason) == ("stop", None, "stop")


def test_end_ids_before_min_tokens_and_stop_ids():
    request = make(eos_token_ids=frozenset({EOS}), params={"min_tokens": 3, "stop_token_ids": [9]})
    steps = Steps(request)
    steps.step(EOS)
    steps.step(9)
    assert not request.is_finished
    steps.step(9)
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, 9)
    assert request.output_token_ids == [0, EOS, 9, 9]


def test_length_ends_a_column_row_and_its_slot_is_free():
    requests = [make("a", 3), make("b", 9)]
    steps = Steps(*requests)
    steps.step(11, 12)
    commit = steps.step(11, 12)
    assert commit.quiet == [requests[1]]
    assert requests[0].finish_reason is FinishReason.LENGTH
    assert requests[0].slot == requests[0].tenure == -1
    assert steps.scheduler.running.num_free_slots(0) == 7


def test_a_failed_row_ends_alone():
    requests = [make("a"), make("b"), make("c")]
    steps = Steps(*requests)
    commit = steps.step(11, -1, 13)
    assert commit.quiet == [requests[0], requests[2]]
    assert [(one.request, one.token_ids) for one in commit.emissions] == [(requests[1], [])]
    assert requests[1].finish_reason is FinishReason.ERROR
    assert [one.num_output_tokens for one in requests] == [2, 1, 2]


@pytest.mark.parametrize("column", ["num_tokens", "capacities", "max_lens", "last_tokens", "flags", "tenures"])
def test_integrity_compares_columns_with_requests(column):
    steps = Steps(make())
    values = getattr(steps.scheduler.running, column)
    for slot in range(2):  # the request's, and one that nobody has
        values[slot] += 1
        with pytest.raises(AssertionError, match="slot"):
            steps.scheduler.check_integrity()
        values[slot] -= 1
    steps.scheduler.check_integrity()


def test_a_prompt_s_last_token_is_no_column_s_row():
    """Its commit registers the prompt's tail, and its logits may be wanted for prompt logprobs."""
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=8, max_model_len=64)
    scheduler = ByColumns(limits, KVCacheManager(64, 8))
    first, second = (Request(name, [*range(9), *tail], SamplingParams(), 5) for name, tail in [("a", []), ("b", [9])])
    scheduler.add(first)
    for tokens in ([], [30]):
        plan = scheduler.schedule()
        assert len(plan.decodes) == 0
        scheduler.commit(plan, StepResult([tokens]))
    scheduler.add(second)
    plan = scheduler.schedule()
    assert second.num_cached_tokens == 9
    assert plan.decodes.requests == [first]


def test_long_requests_have_what_short_ones_admitted_before_leave():
    """The budget's half and the rest: a request admitted in this step counts once among the short ones."""
    limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=100, max_model_len=2000)
    scheduler = Scheduler(limits, KVCacheManager(200, 16))
    rng = random.Random(0)
    for number, length in enumerate([20, 900]):
        prompt = [rng.randrange(30) for _ in range(length)]
        scheduler.add(Request(str(number), prompt, SamplingParams(), 5, arrival=number))
    plan = scheduler.schedule()
    assert [row.num_tokens for row in plan.rows] == [20, 80]
