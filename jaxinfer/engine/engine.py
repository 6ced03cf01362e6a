"""The step loop. One lock guards it; whoever waits for tokens drives it.

submit -> scheduler.schedule() -> runner.dispatch() -> ... -> runner.fetch() -> scheduler.commit() -> outputs
                  ^ up to `depth` steps (or bursts of steps) are between dispatch and fetch ^
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

import jax

from jaxinfer.batch import BatchShape
from jaxinfer.cache import KVCacheManager
from jaxinfer.config import EngineConfig
from jaxinfer.core import FinishReason, Request, SamplingParams, StepPlan
from jaxinfer.engine.build import build
from jaxinfer.engine.interrupts import deferred_interrupts
from jaxinfer.engine.pipeline import Pipeline
from jaxinfer.engine.requests import Prompt, RequestFactory
from jaxinfer.engine.runner import InFlight, Runner
from jaxinfer.engine.state import Answer, RequestState, deliver
from jaxinfer.metrics import EngineStats
from jaxinfer.scheduler import Scheduler, SchedulerLimits


class Engine:
    """A model that runs requests step by step.

    Args:
      config: what to run and how; automatic values are resolved here.
      on_compile: called with the number of programs about to be compiled, and once for each that is done.

    Raises:
      ValueError: the model or the settings cannot be had.
    """

    def __init__(self, config: EngineConfig, on_compile: Callable[[int, bool], None] | None = None) -> None:
        self._on_compile = on_compile or (lambda count, is_done: None)
        parts = build(config, self._on_compile)
        self.config, self.model, self.tokenizer = parts.config, parts.model, parts.tokenizer
        self.account, self.attention = parts.account, parts.attention
        self.runner = parts.runner
        self.lock = threading.RLock()
        self._live: dict[Request, tuple[RequestState, Answer]] = {}
        self._in_flight: deque[InFlight] = deque()
        self._abandoned: deque[RequestState] = deque()
        self._num_commits = 0
        self._counts = EngineStats()
        assert self.config.block_size is not None
        assert self.config.num_blocks is not None
        assert self.config.max_model_len is not None
        assert self.config.depth is not None
        self._most_ahead = (self.config.depth - 1) * self.runner.decode_steps
        self._cache = KVCacheManager(
            self.config.num_blocks,
            self.config.block_size,
            enable_prefix_caching=self.config.enable_prefix_caching,
        )
        self._scheduler = Scheduler(
            _limits(self.config, self.runner),
            self._cache,
            lambda request: self._live[request][1].check_stop(),
        )
        self.factory = RequestFactory(self.model, self.tokenizer, self.config.max_model_len, self.config.seed)
        self._check_generation_config()
        if self.config.warmup == "full":
            self._warm_up()

    def _check_generation_config(self) -> None:
        try:
            self.factory.default_params  # noqa: B018 (made for its checks)
        except (ValueError, TypeError) as error:
            raise ValueError(f"generation_config.json of {self.config.model}: {error}") from None

    num_replicas = 1

    @property
    def num_devices(self) -> int:
        return self.runner.num_devices

    # -- requests ---------------------------------------------------------------------------------

    def make(
        self, prompt: Prompt, params: SamplingParams, *, is_streaming: bool = False, priority: int = 0
    ) -> RequestState:
        """Checks a request without queueing it.

        Raises:
          ValueError: it can never run; the message says why.
        """
        with self.lock:
            requests, text = self.factory.make(prompt, params, priority=priority)
        return RequestState(requests, text, self.tokenizer, is_streaming=is_streaming)

    def submit(self, states: list[RequestState]) -> None:
        """Queues checked requests, and compiles what they can reach where that was left for later."""
        with deferred_interrupts(), self.lock:
            self._reap()
            for state in states:
                for answer in state.answers:
                    self._scheduler.add(answer.request)
                    self._live[answer.request] = state, answer
        if self.config.warmup == "lazy":
            with self.lock:
                self._compile_reachable()

    def abort(self, state: RequestState) -> None:
        """Ends a request wherever it is; one that has ended stays as it is."""
        with deferred_interrupts(), self.lock:
            self._end(state, FinishReason.ABORT)

    def abandon(self, *states: RequestState) -> None:
        """Says that nobody waits for these any more; they are aborted before the engine does anything else.

        Safe anywhere, also in a destructor that the garbage collector runs in the middle of a step.
        """
        self._abandoned.extend(states)

    def _reap(self) -> None:
        while self._abandoned:
            self._end(self._abandoned.popleft(), FinishReason.ABORT)

    def abort_all(self, error: str | None = None) -> None:
        """Ends every live request, with an error if there is one to tell."""
        with deferred_interrupts(), self.lock:
            for state in self.live_states():
                state.error = error if state.error is None else state.error
                self._end(state, FinishReason.ABORT if error is None else FinishReason.ERROR)

    def close(self) -> None:
        """Aborts what runs."""
        self.abort_all()

    def live_states(self) -> list[RequestState]:
        """Every request that has not ended, as of now. Takes no lock, so it waits for no step in progress."""
        return list(dict.fromkeys(state for state, _ in list(self._live.values())))

    def num_known_tokens(self, request: Request) -> int:
        """Tokens at a request's beginning that are cached. Takes no lock: a hint, which eviction may overtake."""
        return 0 if request.params.prompt_logprobs is not None else self._cache.lookup(request).num_tokens

    def find(self, request_id: str) -> RequestState | None:
        """The live request with this id."""
        with self.lock:
            return next((state for state, _ in self._live.values() if state.request.request_id == request_id), None)

    # -- stepping ---------------------------------------------------------------------------------

    def step(self) -> bool:
        """Dispatches the next step if there is one, and commits the oldest if none may be added. False when idle.

        Ctrl-C is held back until the step is whole.
        """
        with deferred_interrupts(), self.lock:
            self._reap()
            try:
                did_something = self._step()
            except Exception as error:  # whatever the device or jax raised: end what was in flight, go on
                self._fail(error)
                return True
            if not did_something:
                self._scheduler.check_integrity()
            return did_something

    def _step(self) -> bool:
        if len(self._in_flight) <= self._most_ahead:
            plans = self._plan()
            if plans:
                dispatched = [InFlight(plan, None) for plan in plans]
                self._in_flight.extend(dispatched)  # so that a failure finds their requests
                done = self.runner.dispatch_burst(plans)
                for _ in dispatched:
                    self._in_flight.pop()
                self._in_flight.extend(done)
                if len(self._in_flight) <= self._most_ahead:
                    return True
        if not self._in_flight:
            return False
        self._commit()
        return True

    def _plan(self) -> list[StepPlan]:
        """The next step, or several: decode steps while nobody waits, which one program can run."""
        plans: list[StepPlan] = []
        while not plans or (
            len(plans) < self.runner.decode_steps and not self._scheduler.waiting and self.runner.may_burst(plans[-1])
        ):
            plan = self._scheduler.schedule()
            if plan.is_empty:
                break
            plans.append(plan)
            self._counts.num_steps += 1
            self._counts.num_mixed_steps += 0 < plan.num_decodes < plan.num_rows
            now = time.perf_counter()
            for row in plan.others:
                if row.is_admission:
                    self._live[row.request][1].timeline.record_scheduled(now)
        return plans

    def _commit(self) -> None:
        step = self._in_flight[0]
        result = self.runner.fetch(step)
        self._in_flight.popleft()
        for chunk in result.prompt_logprobs:
            if chunk.request in self._live:
                self._live[chunk.request][0].add_prompt_logprobs(chunk)
        commit = self._scheduler.commit(step.plan, result)
        self._num_commits += 1
        num_tokens = deliver(commit, result.logprobs, self._live, self._close, self._num_commits)
        self._counts.generation_tokens += num_tokens

    def _end(self, state: RequestState, reason: FinishReason) -> None:
        """Ends what is left of a request."""
        live = [answer for answer in state.answers if answer.request in self._live]
        for answer in live:
            self._scheduler.finish(answer.request, reason)
            self._close(answer)
        if live:
            state.update()

    def _close(self, answer: Answer) -> None:
        del self._live[answer.request]
        self._counts.prompt_tokens += answer.request.num_prompt_tokens if answer.index == 0 else 0
        answer.finish(time.perf_counter())

    def _fail(self, error: Exception) -> None:
        """After a failed step: its requests end, the pool is new, the others go on."""
        self._counts.num_failed_steps += 1
        planned = [row.request for step in self._in_flight for row in step.plan.rows]
        self._in_flight.clear()
        for request in dict.fromkeys([*planned, *self._scheduler.running]):
            if request in self._live:
                state = self._live[request][0]
                state.error = f"a step failed: {type(error).__name__}: {error}"
                self._end(state, FinishReason.ERROR)
        self._cache.reset()
        self.runner.reset()

    # -- programs ---------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Runs every program on padding: XLA captures a command buffer on the second run."""
        repeats = 1 if jax.default_backend() == "cpu" else 3
        self.runner.warm_up_all(repeats)

    def _compile_reachable(self) -> None:
        """Compiles the buckets that the live requests can reach, before any of them runs."""
        requests = list(self._scheduler.live_requests())
        shapes = self._reachable(requests)
        kinds = {"step", "steps", "relay", "receive", "admit"}
        for request in requests:
            kinds |= {"full", "features"} if request.params.needs_full_sampler else set()
            kinds |= {"cut"} if request.params.uses_cuts else set()
            kinds |= {"prompt"} if request.params.prompt_logprobs is not None else set()
        for programs in (stage.programs for stage in self.runner.stages):
            keys = [key for key in programs.keys(shapes) if key[0] in kinds]
            if self.config.enable_prefix_caching:
                keys.append(("copy", programs.copy_sizes[0]))
            missing = programs.missing(keys)
            if missing:
                self._on_compile(len(missing), False)
            programs.compile(missing, lambda key: self._on_compile(0, True))

    def _reachable(self, requests: list[Request]) -> list[BatchShape]:
        ladder, budget = self.runner.ladder, self.config.max_num_batched_tokens
        assert budget is not None
        if not requests:
            return []
        if len(requests) == 1:
            length = requests[0].num_tokens
            chunks = {min(budget, length), length % budget or budget, 1}
            return list({ladder.fit(chunk, 1) for chunk in chunks if chunk <= length})
        rows = min(len(requests), ladder.row_buckets[-1])
        tokens = min(budget, sum(request.num_tokens for request in requests))
        widest = ladder.fit(max(tokens, rows), rows)
        most = ladder.fit(rows, rows).num_rows
        return [
            s for s in ladder.shapes if s.num_tokens <= widest.num_tokens and s.num_rows <= max(most, widest.num_rows)
        ]

    # -- state ------------------------------------------------------------------------------------

    def reset_prefix_cache(self) -> bool:
        """Forgets all reusable prefixes; requests in progress keep what they have."""
        with deferred_interrupts(), self.lock:
            self._reap()
            self._cache.reset()
        return True

    def stats(self) -> EngineStats:
        """Counts and gauges as they are now."""
        with deferred_interrupts(), self.lock:
            self._reap()
            counts, cache = self._counts, self._cache
            programs = [stage.programs for stage in self.runner.stages]
            counts.num_requests_running = len(self._scheduler.running)
            counts.num_requests_waiting = len(self._scheduler.waiting)
            counts.kv_cache_usage_perc = cache.usage
            counts.num_preemptions = self._scheduler.num_preemptions
            counts.prefix_cache_queries = cache.stats.num_queried_tokens
            counts.prefix_cache_hits = cache.stats.num_hit_tokens
            counts.num_block_copies = cache.stats.num_partial_copies
            counts.num_programs = sum(each.stats.num_programs for each in programs)
            counts.num_programs_loaded = sum(each.saved.num_loaded for each in programs if each.saved is not None)
            counts.compile_seconds = sum(each.stats.seconds for each in programs)
            counts.num_compiles_while_serving = sum(each.stats.num_lazy for each in programs)
            counts.num_blocks = self.config.num_blocks or 0
            counts.block_size = self.config.block_size or 0
            counts.max_model_len = self.config.max_model_len or 0
            counts.kernels = self.attention
            return EngineStats(**vars(counts))


def _limits(config: EngineConfig, runner: Runner | Pipeline) -> SchedulerLimits:
    assert config.max_num_seqs is not None
    assert config.max_num_batched_tokens is not None
    assert config.max_model_len is not None
    return SchedulerLimits(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        policy=config.policy,
        num_groups=runner.num_groups,
        has_late_tokens=runner.has_late_tokens,
    )
