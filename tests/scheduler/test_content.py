"""The content-checking property test of the scheduler and cache, and the controls that must fail it."""

from __future__ import annotations

import itertools

import pytest
from content_device import Traffic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.core import PlanRow, Request
from jaxinfer.scheduler import Scheduler

SHAPES = list(itertools.product([1, 2, 3], [0, 1, 5], [True, False], ["fcfs", "priority"]))
STEPS = 160
EXAMPLES = 130  # x STEPS is over 20,000


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    shape=st.sampled_from(SHAPES),
    num_blocks=st.integers(12, 30),
    budget=st.integers(6, 40),
    block_size=st.sampled_from([1, 3, 4, 8]),
    groups=st.sampled_from([(1, False), (1, False), (2, False), (3, False), (3, True)]),
)
def test_random_traffic_gives_solo_tokens(seed, shape, num_blocks, budget, block_size, groups):
    depth, num_drafts, caching, policy = shape
    sizes = {"num_blocks": num_blocks, "budget": budget, "block_size": block_size}
    sizes |= {"num_groups": groups[0], "has_late_tokens": groups[1]}
    traffic = Traffic(seed, depth, num_drafts, caching, policy, **sizes)
    traffic.run(STEPS)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_mechanism_is_exercised(shape):
    """Each combination, with what must have happened in it."""
    depth, num_drafts, caching, policy = shape
    traffic = Traffic(11, depth, num_drafts, caching, policy)
    traffic.run(400)
    seen = traffic.seen
    assert seen["preempted"] > 5
    assert seen["mixed"] > 5
    assert seen["forks"] > 0
    assert (seen["hits"] > 0) == caching
    assert seen["copies"] > 0 or not caching
    assert (seen["stale"] > 0) == (depth > 1)


class SamplesAtPromptEnd(Scheduler):
    """Near-miss of rule 6: a resumed request that replays outputs samples too early."""

    @staticmethod
    def _samples(row: PlanRow, num_known: int) -> bool:
        return row.request.num_computed_tokens >= row.request.num_prompt_tokens


class KeepsPlaceholders(Scheduler):
    """Near-miss of rule 7: a preemption leaves the placeholders."""

    def _preempt(self, draft, victim: Request) -> None:
        kept = victim.num_output_placeholders
        super()._preempt(draft, victim)
        victim.num_output_placeholders = kept


class KeepsDrafts(Scheduler):
    """Near-miss of rule 7: a preemption leaves the drafts."""

    def _preempt(self, draft, victim: Request) -> None:
        kept = victim.num_drafts
        super()._preempt(draft, victim)
        victim.num_drafts = kept


class RejectsEverywhere(Scheduler):
    """Near-miss of rule 10: the correction for rejected drafts applied to rows without drafts."""

    @staticmethod
    def _settle(row: PlanRow, num_emitted: int) -> None:
        request = row.request
        num_rejected = row.num_drafts - (num_emitted - 1)
        request.num_computed_tokens -= num_rejected
        request.num_output_placeholders -= num_rejected + num_emitted


class RegistersInFlight(Scheduler):
    """Near-miss of rule 11: registers up to computed - placeholders, so a chunk still in flight too."""

    def _register(self, row: PlanRow) -> None:
        request = row.request
        committed = request.num_computed_tokens - request.num_output_placeholders
        ends_prompt = row.start < request.num_prompt_tokens <= committed
        self.cache.commit(request, committed, with_tail=ends_prompt)


class LeavesVictimInPlan(Scheduler):
    """Near-miss of rule 4: a victim stays in the step's plan."""

    def _preempt(self, draft, victim: Request) -> None:
        draft.drop = lambda victim: None
        super()._preempt(draft, victim)


@pytest.mark.parametrize(
    "near_miss",
    [
        SamplesAtPromptEnd,
        KeepsPlaceholders,
        KeepsDrafts,
        RejectsEverywhere,
        RegistersInFlight,
        LeavesVictimInPlan,
    ],
)
def test_near_miss_fails(near_miss):
    """Controls: each wrong rule is caught by some traffic."""
    for seed, (depth, num_drafts, caching, policy) in enumerate(SHAPES):
        traffic = Traffic(seed, depth, num_drafts, caching, policy, scheduler_class=near_miss)
        try:
            traffic.run(150)
        except (AssertionError, IndexError):
            return
    pytest.fail("no traffic has caught it")
