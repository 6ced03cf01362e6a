"""What a benchmark runs: requests with lengths, ids and arrivals, drawn from a seed or read from a file.

A trace is a file with one JSON object a line:

    {"input_len": 512, "output_len": 128, "arrival": 0.25}

`input_len` (or `prompt_len`) and `output_len` are tokens; `arrival` is in seconds from the start, given for all
requests or for none; `prompt_token_ids` may give the prompt itself, and then `input_len` may be left out.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

MAX_TOKEN_ID = 10_000
"""Ids of drawn prompts are below this: ordinary tokens in every large vocabulary."""
NANO_PROMPTS = 256
TRACE_KEYS = ("input_len", "prompt_len", "output_len", "arrival", "prompt_token_ids")


@dataclass(frozen=True, slots=True)
class Job:
    """One request of a benchmark; `arrival` in seconds from the start."""

    prompt_token_ids: Sequence[int]
    output_len: int
    arrival: float = 0.0
    num_cached_tokens: int = 0  # that a prefix hit saved, for the floor

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_token_ids)


def draw_nano(vocab_size: int, num_prompts: int = NANO_PROMPTS, seed: int = 0) -> list[Job]:
    """The workload of nano-vllm's bench.py: all prompts are drawn first, then all output lengths.

    With seed 0 and 256 prompts: 142,827 prompt tokens, 133,966 output tokens. Ids are taken modulo the vocabulary,
    which changes nothing where it is larger than 10,000.
    """
    rng = Random(seed)
    prompts = [[rng.randint(0, MAX_TOKEN_ID) for _ in range(rng.randint(100, 1024))] for _ in range(num_prompts)]
    lengths = [rng.randint(100, 1024) for _ in range(num_prompts)]
    return [
        Job([token % vocab_size for token in prompt], length) for prompt, length in zip(prompts, lengths, strict=True)
    ]


def draw_fixed(vocab_size: int, num_prompts: int, input_len: int, output_len: int, seed: int | str = 0) -> list[Job]:
    """Random prompts of one length."""
    rng = Random(seed)
    return [Job(draw_ids(rng, input_len, vocab_size), output_len) for _ in range(num_prompts)]


def draw_ids(rng: Random, count: int, vocab_size: int) -> list[int]:
    return [rng.randrange(min(MAX_TOKEN_ID, vocab_size)) for _ in range(count)]


def draw_arrivals(jobs: Sequence[Job], rate: float, seed: int = 0) -> list[Job]:
    """The same jobs arriving as a Poisson process of `rate` a second, the first one at 0; all at 0 if it is inf."""
    rng, moment, arriving = Random(f"arrivals {seed}"), 0.0, []
    for job in jobs:
        arriving.append(dataclasses.replace(job, arrival=moment))
        moment += 0.0 if math.isinf(rate) else rng.expovariate(rate)
    return arriving


def draw_warm_up(jobs: Sequence[Job], vocab_size: int, *, max_num_seqs: int, max_num_batched_tokens: int) -> list[Job]:
    """Requests that make an engine run everything the jobs will need: their longest prompts with other ids, at once.

    As many as run at once and fill a step's budget. They wait for each other's prompts; then, every third token, the
    number of rows is halved, so that every smaller batch is run as well.
    """
    longest: list[Job] = []
    num_tokens = 0
    for job in sorted(jobs, key=lambda job: job.prompt_len, reverse=True):
        if len(longest) >= max_num_seqs and num_tokens >= max_num_batched_tokens:
            break
        longest.append(job)
        num_tokens += job.prompt_len
    rng, chunk = Random("warm-up"), max(max_num_batched_tokens - max_num_seqs, 1)
    warm, behind = [], num_tokens
    for number, job in enumerate(longest, start=1):
        behind -= job.prompt_len
        num_waits, num_halvings = -(-behind // chunk), (len(longest) // number).bit_length()
        output_len = min(job.output_len, num_waits + 3 * num_halvings)
        warm.append(Job(draw_ids(rng, job.prompt_len, vocab_size), output_len))
    return warm


def check_jobs(jobs: Iterable[Job], *, max_model_len: int, vocab_size: int) -> None:
    """Refuses what an engine could not run to its end.

    Raises:
      ValueError: names the request, by its number, and the numbers that do not fit.
    """
    for number, job in enumerate(jobs):
        if job.prompt_len + job.output_len > max_model_len:
            raise ValueError(
                f"request {number} has {job.prompt_len} + {job.output_len} tokens; max_model_len is {max_model_len}"
            )
        largest = max(job.prompt_token_ids)
        if largest >= vocab_size:
            raise ValueError(f"request {number} has token id {largest}; the vocabulary has {vocab_size}")


# -- traces --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TraceEntry:
    """A line of a trace. Ids are drawn later where it has none."""

    input_len: int
    output_len: int
    arrival: float | None
    prompt_token_ids: list[int] | None


def read_trace(name: str) -> list[TraceEntry]:
    """A trace file's requests.

    Raises:
      ValueError: a file that cannot be read, an empty one, or a line that is no request; says which.
    """
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"trace {name}: {error}") from None
    entries = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                entries.append(_parse_entry(json.loads(line)))
            except ValueError as error:
                raise ValueError(f"trace {name}, line {number}: {error}") from None
    if not entries:
        raise ValueError(f"trace {name} has no requests")
    if len({entry.arrival is None for entry in entries}) > 1:
        raise ValueError(f"trace {name}: some requests have an arrival, some have none")
    return entries


def draw_trace(entries: Sequence[TraceEntry], vocab_size: int, seed: int = 0) -> list[Job]:
    """A trace's requests with ids; arrivals are counted from the earliest."""
    rng = Random(seed)
    first = min((entry.arrival or 0.0 for entry in entries), default=0.0)
    return [
        Job(
            entry.prompt_token_ids or draw_ids(rng, entry.input_len, vocab_size),
            entry.output_len,
            (entry.arrival or 0.0) - first,
        )
        for entry in entries
    ]


def _parse_entry(entry: Any) -> TraceEntry:
    if not isinstance(entry, dict):
        raise ValueError("not an object")
    unknown = sorted(set(entry) - set(TRACE_KEYS))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; known are {', '.join(TRACE_KEYS)}")
    ids = entry.get("prompt_token_ids")
    if ids is not None and (not isinstance(ids, list) or not ids or not all(_is_count(token, 0) for token in ids)):
        raise ValueError("prompt_token_ids is not a list of token ids")
    given = [entry[name] for name in ("input_len", "prompt_len") if entry.get(name) is not None]
    lengths = given + ([] if ids is None else [len(ids)])
    if not lengths or not all(_is_count(length, 1) for length in lengths):
        raise ValueError("input_len must be a positive integer")
    if len(set(lengths)) > 1:
        raise ValueError(f"the prompt's length is said to be {' and '.join(map(str, lengths))}")
    if not _is_count(entry.get("output_len"), 1):
        raise ValueError(f"output_len must be a positive integer, got {entry.get('output_len')!r}")
    return TraceEntry(lengths[0], entry["output_len"], _parse_arrival(entry.get("arrival")), ids)


def _parse_arrival(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"arrival must be a number of seconds >= 0, got {value!r}")
    return float(value)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
