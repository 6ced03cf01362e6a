"""What a decode step costs the host: planning, packing, and committing its tokens. No device is needed.

    python scripts/bench_scheduler.py [--running 1 32 256 1024] [--depth 2] [--watched] [--one-by-one]

Prints medians (and minima) in microseconds over many steps in which every request decodes one token:

    schedule   Scheduler.schedule, with a new block for one row in `block_size`
    pack       the plan as the int32 buffer that the device reads
    commit     Scheduler.commit: tokens appended, ends found, full blocks registered in the prefix index
    deliver    times and outputs of the answers, as the engine keeps them

The garbage collector stays on, as in an engine.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from jaxinfer.batch import BatchLayout, BatchShape
from jaxinfer.cache import KVCacheManager
from jaxinfer.core import Request, SamplingParams, StepPlan, StepResult
from jaxinfer.engine.inputs import pack
from jaxinfer.engine.state import Answer, RequestState, deliver
from jaxinfer.scheduler import Scheduler, SchedulerLimits

STAGES = ("schedule", "pack", "commit", "deliver")
MAX_MODEL_LEN = 4096
TOKEN = 7


class Host:
    """An engine's host side over a device that answers at once, and always the same.

    Args:
      num_running: requests, all of which run at once.
      depth: steps in flight.
      is_watched: every token is looked at, as for a stream or stop strings.
      block_size: tokens a block.
    """

    def __init__(self, num_running: int, *, depth: int, is_watched: bool, block_size: int) -> None:
        num_blocks = num_running * -(-MAX_MODEL_LEN // block_size) + 1
        limits = SchedulerLimits(
            max_num_seqs=num_running, max_num_batched_tokens=max(8192, num_running), max_model_len=MAX_MODEL_LEN
        )
        self.live: dict[Request, tuple[RequestState, Answer]] = {}
        self.scheduler = Scheduler(
            limits, KVCacheManager(num_blocks, block_size), lambda request: self.live[request][1].check_stop()
        )
        shape = BatchShape(num_running, num_running, True, block_size)
        self.layout = BatchLayout(shape)
        self.depth, self.num_running = depth, num_running
        self.in_flight: deque[StepPlan] = deque()
        rng = random.Random(0)
        for number in range(num_running):
            self._submit(number, [rng.randrange(1000) for _ in range(rng.randrange(1, 2 * block_size))], is_watched)
        while not self._is_steady():
            self.scheduler.commit(*self._answer(self.scheduler.schedule()))

    def _submit(self, number: int, prompt: list[int], is_watched: bool) -> None:
        request = Request(
            request_id=str(number),
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=None),
            max_tokens=MAX_MODEL_LEN - len(prompt),
            arrival=number,
            eos_token_ids=frozenset({TOKEN + 1, TOKEN + 2}),
            is_watched=is_watched,
        )
        state = RequestState([request], None, None)
        self.live[request] = state, state.answers[0]
        self.scheduler.add(request)

    def _is_steady(self) -> bool:
        is_steady = (request.num_output_tokens > 0 for request in self.live)
        return len(self.scheduler.running) == self.num_running and all(is_steady)

    @staticmethod
    def _answer(plan: StepPlan) -> tuple[StepPlan, StepResult]:
        tokens = np.full(len(plan.decodes), TOKEN, np.int32)
        return plan, StepResult([[TOKEN] if row.samples else [] for row in plan.others], decode_token_ids=tokens)

    def step(self) -> Iterator[float]:
        """Runs a step; moments before, between and after the stages."""
        yield time.perf_counter()
        plan = self.scheduler.schedule()
        yield time.perf_counter()
        pack(plan, self.layout, self.num_running)
        yield time.perf_counter()
        self.in_flight.append(plan)
        if len(self.in_flight) < self.depth:
            return
        result = self._answer(self.in_flight.popleft())
        yield time.perf_counter()
        commit = self.scheduler.commit(*result)
        yield time.perf_counter()
        deliver(commit, None, self.live, lambda answer: None)
        yield time.perf_counter()


def measure(host: Host, num_steps: int) -> dict[str, list[float]]:
    """Seconds of each stage, a step each."""
    for _ in range(host.depth + 3):
        list(host.step())
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for _ in range(num_steps):
        moments = list(host.step())
        for stage, first in zip(STAGES, (0, 1, 3, 4), strict=True):
            seconds[stage].append(moments[first + 1] - moments[first])
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--running", type=int, nargs="+", default=[1, 32, 256, 1024], help="numbers of requests")
    parser.add_argument("--depth", type=int, default=2, help="steps in flight")
    parser.add_argument("--steps", type=int, default=500, help="steps to measure")
    parser.add_argument("--block-size", type=int, default=64, help="tokens a block")
    parser.add_argument("--watched", action="store_true", help="look at every token, as for streams and stop strings")
    parser.add_argument("--one-by-one", action="store_true", help="without columns: go through the requests")
    args = parser.parse_args()
    if args.one_by_one:
        Scheduler.MIN_COLUMN_ROWS = 1 << 30
    print(f"{'running':>8}" + "".join(f"{stage:>18}" for stage in (*STAGES, "all")) + "   us, median (min)")
    for num_running in args.running:
        host = Host(num_running, depth=args.depth, is_watched=args.watched, block_size=args.block_size)
        seconds = measure(host, args.steps)
        seconds["all"] = [sum(parts) for parts in zip(*seconds.values(), strict=True)]
        cells = [f"{statistics.median(one) * 1e6:,.0f} ({min(one) * 1e6:,.0f})" for one in seconds.values()]
        print(f"{num_running:8}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
