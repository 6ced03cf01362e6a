"""Runs a workload on an engine and notes when every token came: what `python -m jaxinfer.bench` is made of."""

from __future__ import annotations

import dataclasses
import json
import platform
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxinfer
from jaxinfer.core import SamplingParams
from jaxinfer.engine import Engine, Replicas
from jaxinfer.engine.state import RequestState
from jaxinfer.llm import LLM
from jaxinfer.metrics.floor import Floor, Limits, find_floor
from jaxinfer.metrics.roofline import ModelShape, Precision, Roof, find_roof
from jaxinfer.metrics.shapes import SHAPES, hf_config
from jaxinfer.metrics.summary import RequestRecord
from jaxinfer.metrics.workload import Job, check_jobs, draw_warm_up

DEFAULT_MAX_MODEL_LEN = 4096
"""Of the named shapes, as in the baselines: the models themselves allow ten times that."""
NUM_WARM_UPS = 2
"""XLA captures a program's command buffer on its second run."""
COUNTERS = (
    "num_steps",
    "num_failed_steps",
    "num_preemptions",
    "prefix_cache_hits",
    "num_programs",
    "num_compiles_while_serving",
)
"""Counts of `EngineStats` whose growth during a measured run is reported."""

type Around = Callable[[], AbstractContextManager[Any]]
"""Makes a context that the measured part runs in, such as a profiler's."""


@dataclass(frozen=True)
class Subject:
    """What is measured."""

    llm: LLM
    shape: ModelShape
    name: str
    load_seconds: float

    @property
    def vocab_size(self) -> int:
        return self.llm.engine.model.vocab_size

    @property
    def num_devices(self) -> int:
        return self.llm.engine.num_devices

    @property
    def limits(self) -> Limits:
        """Of all replicas together."""
        config, count = self.llm.config, self.llm.engine.num_replicas
        assert config.max_num_seqs is not None
        assert config.max_num_batched_tokens is not None
        return Limits(
            max_num_seqs=count * config.max_num_seqs, max_num_batched_tokens=count * config.max_num_batched_tokens
        )


@dataclass(frozen=True)
class Run:
    """A measured run: its requests, seconds of wall time, and how the engine's counts grew."""

    records: list[RequestRecord]
    seconds: float
    counts: dict[str, int]


def load_subject(config: str | None, options: dict[str, Any]) -> Subject:
    """A model on disk, or a named shape with random weights.

    Args:
      config: a name of `SHAPES`, or None for what `options` name.
      options: keyword arguments of `LLM`.

    Raises:
      ValueError: the model or the settings cannot be had.
    """
    start = time.perf_counter()
    if config is None:
        llm = LLM(**options)
        return Subject(llm, ModelShape.of(llm.engine.model), llm.config.model, time.perf_counter() - start)
    longest = options.get("max_model_len") or DEFAULT_MAX_MODEL_LEN
    settings = {**hf_config(config), "max_position_embeddings": longest}
    with tempfile.TemporaryDirectory(prefix="jaxinfer-bench-") as folder:
        Path(folder, "config.json").write_text(json.dumps(settings), encoding="utf-8")
        llm = LLM(**{**options, "model": folder, "load_format": "dummy"})
    return Subject(llm, SHAPES[config], config, time.perf_counter() - start)


# -- running -------------------------------------------------------------------------------------


def drive(engine: Engine | Replicas, jobs: Sequence[Job], params: SamplingParams) -> list[RequestRecord]:
    """Submits each job when it is due and steps the engine until all have ended, from one thread.

    A job's record counts from the moment it was due, so waiting for a step in progress and in the queue are included,
    and so is the time the engine takes to check a request.

    Args:
      engine: idle.
      jobs: in any order; arrivals in seconds from the call.
      params: for all; `max_tokens` is each job's own.

    Returns:
      A record a job, in the order of `jobs`.

    Raises:
      ValueError: a job that the engine refuses.
    """
    records = [RequestRecord(job.arrival, job.prompt_len) for job in jobs]
    waiting = deque(sorted(range(len(jobs)), key=lambda index: jobs[index].arrival))
    live: dict[int, RequestState] = {}
    start = time.perf_counter()
    while waiting or live:
        now = time.perf_counter() - start
        due = []
        while waiting and jobs[waiting[0]].arrival <= now:
            due.append(waiting.popleft())
        if due:
            made = {index: _make(engine, jobs[index], params) for index in due}
            engine.submit(list(made.values()))
            live.update(made)
        if not live:
            time.sleep(jobs[waiting[0]].arrival - now)
            continue
        engine.step()
        ended = [index for index, state in live.items() if _note(records[index], state, start)]
        for index in ended:
            del live[index]
    while engine.step():  # a step dispatched ahead may be left
        pass
    return records


def _make(engine: Engine | Replicas, job: Job, params: SamplingParams) -> RequestState:
    return engine.make(job.prompt_token_ids, dataclasses.replace(params, max_tokens=job.output_len))


def _note(record: RequestRecord, state: RequestState, start: float) -> bool:
    """Adds what the last step gave to a request; True when the request has ended."""
    has_ended = bool(state.outputs)  # asked first: a replica's thread may add to the rest meanwhile
    answer = state.answers[0]
    timeline, request = answer.timeline, answer.request
    if timeline.last_token is not None and timeline.num_output_tokens != record.num_output_tokens:
        record.events.append((timeline.last_token - start, timeline.num_output_tokens))
    if not has_ended:
        return False
    record.num_cached_tokens = max(request.num_cached_tokens, 0)
    record.num_preemptions = request.epoch
    record.error = state.error
    return True


def warm_up(subject: Subject, jobs: Sequence[Job], params: SamplingParams) -> None:
    """Runs what the jobs will need, with other prompts, and forgets their prefixes."""
    engine = subject.llm.engine
    warm = draw_warm_up(jobs, subject.vocab_size, **dataclasses.asdict(subject.limits))
    for _ in range(NUM_WARM_UPS):
        drive(engine, warm, params)
        engine.reset_prefix_cache()


def measure(
    subject: Subject,
    rounds: Sequence[Sequence[Job]],
    params: SamplingParams,
    around: Around = nullcontext,
) -> Run:
    """Warms up, then runs the rounds one after the other, each on an engine without prefixes to reuse.

    Args:
      subject: to measure.
      rounds: jobs that run together; every round has the same lengths.
      params: for all.
      around: a context for the measured part.

    Raises:
      ValueError: a job that cannot be run.
    """
    config, engine = subject.llm.config, subject.llm.engine
    assert config.max_model_len is not None
    for jobs in rounds:
        check_jobs(jobs, max_model_len=config.max_model_len, vocab_size=subject.vocab_size)
    warm_up(subject, rounds[0], params)
    records, seconds = [], 0.0
    before = subject.llm.stats()
    with around():
        for jobs in rounds:
            start = time.perf_counter()
            records += drive(engine, jobs, params)
            seconds += time.perf_counter() - start
            engine.reset_prefix_cache()
    after = subject.llm.stats()
    return Run(records, seconds, {name: after[name] - before[name] for name in COUNTERS if name in after})


# -- the floor -----------------------------------------------------------------------------------


def floor_of(subject: Subject, jobs: Sequence[Job], records: Sequence[RequestRecord], roof: Roof) -> Floor:
    """The same jobs on as many ideal engines as there are replicas, with the prefix hits that the real ones had.

    Args:
      roof: of all devices together.
    """
    pairs = zip(jobs, records, strict=True)
    same = [dataclasses.replace(job, num_cached_tokens=record.num_cached_tokens) for job, record in pairs]
    config = subject.llm.config
    precision = Precision(jnp.dtype(config.dtype).itemsize, jnp.dtype(config.cache_dtype).itemsize)
    return find_floor(same, subject.shape, roof, subject.limits, precision, subject.llm.engine.num_replicas)


def roof_here(num_devices: int = 1) -> Roof | None:
    """The roof of the devices at hand, as if they were one: known, measured where it is a CPU, or None."""
    device = jax.devices()[0]
    if device.platform == "cpu":  # whose devices are one machine
        return _measure_roof()
    roof = find_roof(device.device_kind)
    if roof is None:
        return None
    return dataclasses.replace(roof, bandwidth=roof.bandwidth * num_devices, peak=roof.peak * num_devices)


@cache
def _measure_roof() -> Roof:
    """float32: the bytes of a matrix-vector product, the operations of a matrix product."""
    weights, vector = jnp.ones((4096, 8192), jnp.float32), jnp.ones(8192, jnp.float32)
    square = jnp.ones((1024, 1024), jnp.float32)
    bandwidth = weights.nbytes / _best_seconds(weights, vector)
    return Roof(bandwidth, 2 * 1024**3 / _best_seconds(square, square), "measured")


def _best_seconds(left: jax.Array, right: jax.Array, repeats: int = 8) -> float:
    product, best = jax.jit(jnp.matmul), float("inf")
    jax.block_until_ready(product(left, right))
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(product(left, right))
        best = min(best, time.perf_counter() - start)
    return best


# -- what was measured ---------------------------------------------------------------------------


def describe(subject: Subject) -> dict[str, Any]:
    """Versions, device, model and engine, for a report."""
    device, config = jax.devices()[0], subject.llm.config
    stats = subject.llm.stats()
    return {
        "versions": {
            "jaxinfer": jaxinfer.__version__,
            "jax": jax.__version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "runtime": " ".join(device.client.platform_version.split()),
        },
        "device": {"platform": device.platform, "kind": device.device_kind, "count": subject.num_devices},
        "model": {
            "name": subject.name,
            "architecture": subject.llm.engine.model.architecture,
            "num_parameters": subject.shape.num_parameters,
            "dtype": config.dtype,
            **dataclasses.asdict(subject.shape),
        },
        "engine": {
            "load_format": config.load_format,
            "kernels": stats["kernels"],
            "kv_cache_dtype": config.cache_dtype,
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "max_num_batched_tokens": config.max_num_batched_tokens,
            "block_size": config.block_size,
            "num_blocks": config.num_blocks,
            "depth": config.depth,
            "mesh": None if config.mesh is None else str(config.mesh),
            "policy": config.policy,
            "warmup": config.warmup,
            "enable_prefix_caching": config.enable_prefix_caching,
            "load_seconds": subject.load_seconds,
            "num_programs": stats["num_programs"],
            "compile_seconds": stats["compile_seconds"],
        },
        "memory_bytes": subject.llm.engine.account.terms,
    }
