"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(slots=True)
class Logprob:
    """A raw log-probability, its rank (1 = best) and the token's text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One answer. `text` is what streaming produced; `stop_reason` is the stop string or id that matched."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestMetrics:
    """Times of one request in seconds since its arrival; None for what has not happened."""

    time_to_first_token: float | None = None
    time_per_output_token: float | None = None
    e2e_latency: float | None = None
    queue_time: float | None = None
    num_preemptions: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


def _shorten(text: str, length: int = 80) -> str:
    return text if len(text) <= length else text[: length - 3] + "..."


@dataclass(repr=False)
class RequestOutput:
    """A request's state at one moment; the last one has `finished` True."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    error: str | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    def __repr__(self) -> str:
        """Short enough for a notebook: texts, not ids."""
        prompt = f"{len(self.prompt_token_ids)} tokens" if self.prompt is None else repr(_shorten(self.prompt))
        texts = [f"{_shorten(answer.text)!r} ({answer.finish_reason or 'growing'})" for answer in self.outputs]
        return f"RequestOutput({self.request_id!r}, prompt {prompt}: {', '.join(texts)})"
