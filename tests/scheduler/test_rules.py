"""Exact counts and rules of the scheduler, one by one, over the content-checking device."""

from __future__ import annotations

import random

import pytest
from content_device import VOCAB, Device, solo_run

from jaxinfer.cache import KVCacheManager
from jaxinfer.core import FinishReason, Request, RequestStatus, SamplingParams, StepPlan
from jaxinfer.scheduler import Scheduler, SchedulerLimits, resolve_max_model_len, resolve_max_tokens


class Bench:
    """A scheduler over a device, driven one step at a time."""

    def __init__(self, num_blocks=64, block_size=16, max_num_seqs=8, budget=512, max_model_len=None, **limits):
        self.cache = KVCacheManager(num_blocks, block_size)
        length = resolve_max_model_len(max_model_len, 10**9, self.cache.num_usable_tokens)
        self.limits = SchedulerLimits(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=length, **limits
        )
        self.scheduler = Scheduler(self.limits, self.cache)
        self.device = Device(
            num_blocks,
            block_size,
            max_num_seqs,
            0,
            random.Random(0),
            self.limits.num_groups,
            self.limits.has_late_tokens,
        )
        self.in_flight = []
        self.count = 0

    def add(self, prompt, max_tokens=3, **fields) -> Request:
        params = SamplingParams(max_tokens=max_tokens)
        room = resolve_max_tokens(len(prompt), params, self.limits.max_model_len)
        request = Request(f"r{self.count}", list(prompt), params, room, arrival=self.count, **fields)
        self.count += 1
        self.scheduler.add(request)
        return request

    def dispatch(self) -> StepPlan:
        plan = self.scheduler.schedule()
        if not plan.is_empty:
            self.in_flight.append((plan, self.device.run(plan)))
        return plan

    def commit(self) -> None:
        self.scheduler.commit(*self.in_flight.pop(0))
        self.device.commit(self.cache.index)
        self.scheduler.check_integrity()

    def step(self) -> StepPlan:
        plan = self.dispatch()
        if self.in_flight:
            self.commit()
        return plan

    def finish(self) -> int:
        """Runs to the end; the number of prompt or output tokens computed."""
        total = 0
        while self.scheduler.has_work or self.in_flight:
            total += self.step().num_tokens
        assert self.cache.pool.num_used == 0
        return total


def tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(8, VOCAB) for _ in range(count)]


def check(request: Request) -> None:
    assert request.output_token_ids == solo_run_no_eos(request)


def solo_run_no_eos(request: Request) -> list[int]:
    """`solo_run` stops at EOS; these requests have none, so it is continued from there."""
    out: list[int] = []
    while len(out) < request.max_tokens:
        out += solo_run([*request.prompt_token_ids, *out], request.max_tokens - len(out))
    return out


@pytest.mark.parametrize(
    ("length", "block_size", "cached"),
    [
        (465, 256, 464),
        (512, 256, 511),
        (511, 256, 510),
        (513, 256, 512),
        (256, 256, 255),
        (1, 16, 0),
        (2, 16, 1),
    ],
)
def test_resent_prompt_recomputes_one_token(length, block_size, cached):
    """D1, D2, E3: exact counts at and around multiples of the block, twice."""
    bench = Bench(num_blocks=8, block_size=block_size, budget=600)
    prompt = tokens(length)
    first = bench.add(prompt)
    bench.finish()
    assert first.num_cached_tokens == 0
    second = bench.add(prompt)
    plan = bench.step()
    assert second.num_cached_tokens == cached
    assert plan.num_tokens == length - cached
    bench.finish()
    assert first.output_token_ids == second.output_token_ids
    check(second)


def test_hit_reaches_into_generated_tokens():
    bench = Bench(num_blocks=16, block_size=16)
    first = bench.add(tokens(20), max_tokens=30)
    bench.finish()
    second = bench.add([*first.token_ids, 9], max_tokens=2)
    bench.finish()
    assert second.num_cached_tokens == 49  # the last output's K and V were never computed
    check(second)


def test_salts_isolate():
    """D5: salts A, A, B on a ten-token prompt."""
    bench = Bench()
    prompt = tokens(10)
    cached = []
    for salt in "AAB":
        request = bench.add(prompt, cache_salt=salt)
        bench.finish()
        check(request)
        cached.append(request.num_cached_tokens)
    assert cached == [0, 9, 0]


def test_cached_prompt_that_fills_the_pool_is_served_again():
    bench = Bench(num_blocks=5, block_size=4)  # 16 usable tokens
    prompt = tokens(15)
    bench.add(prompt)
    bench.finish()
    again = bench.add(prompt)
    bench.step()
    assert again.num_cached_tokens == 14
    bench.finish()
    check(again)


def test_twins_in_one_step_do_not_hit_each_other():
    """D3 and rule 19: uncommitted blocks are never hit."""
    bench = Bench(budget=300)
    prompt = tokens(100)
    twins = [bench.add(prompt), bench.add(prompt)]
    plan = bench.step()
    assert plan.num_tokens == 200
    assert [twin.num_cached_tokens for twin in twins] == [0, 0]
    bench.finish()
    for twin in twins:
        check(twin)


def test_eviction_in_the_middle_stops_hits_at_the_gap():
    """D8 and rule 19."""
    bench = Bench(num_blocks=9, block_size=4)
    prompt = tokens(16)
    request = bench.add(prompt, max_tokens=1)
    plan = bench.step()
    assert plan.num_tokens == 16
    middle = next(iter(bench.cache.index._children[bench.cache.index.extend(bench.cache.index.root(), prompt[:4])]))
    bench.cache.index.drop(middle[1])
    again = bench.add(prompt, max_tokens=1)
    bench.finish()
    assert again.num_cached_tokens == 4
    assert request.output_token_ids == again.output_token_ids


def test_eviction_takes_the_tail_of_the_least_recent_first():
    bench = Bench(num_blocks=9, block_size=4, max_num_seqs=2)
    old, new = tokens(16, 1), tokens(12, 2)
    for prompt in (old, new):
        bench.add(prompt, max_tokens=1)
        bench.finish()
    bench.add(tokens(7, 3), max_tokens=1)  # takes the one unused block and the old prompt's tail
    bench.finish()
    again = bench.add(old, max_tokens=1)
    bench.step()
    assert again.num_cached_tokens == 12
    check(again)


def test_reset_forgets_and_running_requests_go_on():
    bench = Bench()
    running = bench.add(tokens(40), max_tokens=40)
    bench.step()
    bench.cache.reset()
    second = bench.add(tokens(40), max_tokens=2)
    bench.step()
    assert second.num_cached_tokens == 0
    bench.finish()
    check(running)
    check(second)


def test_impossible_requests_are_refused_at_submission():
    """C1: 50 blocks; prompts that need 49, 50 and 51; small ones behind."""
    bench = Bench(num_blocks=51, block_size=16, budget=128)
    for blocks in (49, 50):
        request = bench.add(tokens(blocks * 16 - 1), max_tokens=1)
        small = bench.add(tokens(5), max_tokens=2)
        bench.finish()
        check(request)
        check(small)
    with pytest.raises(ValueError, match="816 tokens; with max_model_len 800"):
        bench.add(tokens(51 * 16))
    with pytest.raises(ValueError, match="min_tokens 900"):
        resolve_max_tokens(10, SamplingParams(max_tokens=None, min_tokens=900), 800)
    with pytest.raises(ValueError, match="does not fit in the KV cache of 800"):
        resolve_max_model_len(801, 10_000, 800)
    assert resolve_max_model_len(None, 10_000, 800) == 800


def test_max_tokens_is_clipped_and_the_last_position_is_never_computed():
    bench = Bench(num_blocks=3, block_size=8, budget=16)
    request = bench.add(tokens(10), max_tokens=100)
    assert request.max_tokens == 6
    assert bench.finish() == 15  # 16 positions, of which the last token needs no K and V
    assert request.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("num_long", [1, 3])
def test_short_requests_start_behind_long_prompts(num_long):
    """C7 and rule 8: within a few steps behind one and behind three long prompts; no budget is wasted."""
    bench = Bench(num_blocks=4000, block_size=16, budget=512)
    longs = [bench.add(tokens(12_000, seed), max_tokens=2) for seed in range(num_long)]
    bench.step()
    short = bench.add(tokens(50, 9), max_tokens=5)
    plan = bench.step()
    assert short.num_output_tokens == 1
    assert plan.num_tokens == 512
    for _ in range(4):
        assert bench.step().num_tokens == 512
    assert short.is_finished
    bench.finish()
    for request in [*longs, short]:
        check(request)


def test_long_chunks_leave_half_the_budget_to_short_ones():
    bench = Bench(num_blocks=4000, block_size=16, budget=512, max_num_seqs=16)
    long = bench.add(tokens(3000, 1), max_tokens=2)
    bench.step()
    shorts = [bench.add(tokens(100, seed), max_tokens=2) for seed in range(2, 8)]
    plan = bench.step()
    granted = {row.request: row.num_tokens for row in plan.rows}
    assert granted[long] == 256
    assert plan.num_tokens == 512
    assert [request in granted for request in shorts] == [True, True, True, False, False, False]


def test_two_requests_that_outgrow_the_pool():
    """C3: two 34-token prompts, 35 outputs, 7 blocks of 16: as with a large pool."""
    results = []
    for num_blocks in (8, 64):
        bench = Bench(num_blocks=num_blocks, block_size=16)
        requests = [bench.add(tokens(34, seed), max_tokens=35) for seed in (1, 2)]
        bench.finish()
        results.append([request.output_token_ids for request in requests])
        assert (bench.scheduler.num_preemptions > 0) == (num_blocks == 8)
    assert results[0] == results[1]


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_in_every_state(depth):
    """C5: a thousand aborts, in each state and after each chunk; the pool is back at its baseline."""
    rng = random.Random(depth)
    states = set()
    bench = Bench(num_blocks=12, block_size=4, max_num_seqs=3, budget=9)
    for round_ in range(1000):
        victim = bench.add(tokens(rng.randrange(1, 30), round_), max_tokens=12)
        other = bench.add(tokens(rng.randrange(1, 30), -round_), max_tokens=12) if round_ % 3 == 0 else None
        for _ in range(rng.randrange(24)):
            bench.dispatch()
            if len(bench.in_flight) >= depth:
                bench.commit()
        states.add((victim.status, victim.num_output_tokens > 0, victim.num_in_flight_tokens > 0))
        before = victim.num_output_tokens
        bench.scheduler.finish(victim, FinishReason.ABORT)
        bench.scheduler.finish(victim, FinishReason.STOP)  # ending it again does nothing
        bench.scheduler.check_integrity()
        if round_ % 7 == 0:
            bench.finish()
            assert bench.cache.pool.num_used == 0
        was_live = victim.finish_reason is FinishReason.ABORT
        assert victim.num_output_tokens == before or not was_live
        if other is not None and other.is_finished and other.finish_reason is not FinishReason.ABORT:
            check(other)
    bench.finish()
    kinds = {state for state, _, _ in states}
    assert kinds == set(RequestStatus)
    assert any(in_flight for _, _, in_flight in states) == (depth == 2)


def test_priority_victims_and_order():
    bench = Bench(num_blocks=9, block_size=4, max_num_seqs=3, budget=32, policy="priority")
    low = bench.add(tokens(10, 1), max_tokens=20, priority=5)
    bench.step()
    high = bench.add(tokens(10, 2), max_tokens=20, priority=0)
    middle = bench.add(tokens(4, 3), max_tokens=4, priority=2)
    bench.finish()
    assert low.epoch > 0
    assert high.epoch == 0
    for request in (low, high, middle):
        check(request)


# -- groups ----------------------------------------------------------------------------------------


def test_groups_take_turns_and_share_alike():
    """Five requests over two groups: three and two, each in every other step; a group without any is passed over."""
    bench = Bench(num_groups=2, max_num_seqs=6)
    requests = [bench.add(tokens(4, seed), max_tokens=8) for seed in range(5)]
    plans = [bench.dispatch() for _ in range(4)]
    assert [(plan.group, plan.num_rows) for plan in plans] == [(0, 3), (1, 2)] * 2
    for _ in plans:
        bench.commit()
    for request in [row.request for row in plans[0].rows]:
        bench.scheduler.finish(request, FinishReason.ABORT)
    assert [bench.step().group for _ in range(3)] == [1, 1, 1]
    bench.finish()
    for request in requests:
        if request.finish_reason is not FinishReason.ABORT:
            check(request)


def test_groups_wait_for_late_tokens():
    """Each group's next step is planned when its last one has been committed, and not before."""
    bench = Bench(num_groups=2, has_late_tokens=True)
    requests = [bench.add(tokens(4, seed), max_tokens=6) for seed in range(3)]
    assert [bench.dispatch().num_rows for _ in range(3)] == [2, 1, 0]
    bench.commit()
    assert [bench.dispatch().num_rows for _ in range(2)] == [2, 0]
    bench.finish()
    for request in requests:
        check(request)


def test_a_full_group_leaves_the_rest_to_the_others():
    """Three slots for two groups, two of them the first group's; the fourth request waits for a slot of any group."""
    bench = Bench(num_groups=2, max_num_seqs=3)
    requests = [bench.add(tokens(4, seed), max_tokens=3 + seed) for seed in range(4)]
    assert [bench.step().num_rows for _ in range(4)] == [2, 1, 2, 1]
    assert len(bench.scheduler.waiting) == 1
    bench.finish()
    for request in requests:
        check(request)


def test_a_victim_of_another_group():
    """The newest request is preempted for one of the other group, by columns and one by one; tokens stay the same."""
    for count in (4, 20):
        bench = Bench(num_groups=2, max_num_seqs=count, num_blocks=count * 3 - 1, block_size=4, budget=64)
        requests = [bench.add(tokens(4, seed), max_tokens=12) for seed in range(count)]
        bench.finish()
        assert bench.scheduler.num_preemptions > 0
        for request in requests:
            check(request)
