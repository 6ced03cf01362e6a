"""What the engine keeps of a request beside the scheduler's counters: its text, logprobs, times and outputs.

A caller's request (`RequestState`) has n answers; each is a `Request` of the scheduler.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxinfer.core import (
    CompletionOutput,
    FinishReason,
    Logprob,
    PromptLogprobs,
    Request,
    RequestMetrics,
    RequestOutput,
)
from jaxinfer.engine.text import StopStrings
from jaxinfer.metrics import Timeline, combine
from jaxinfer.metrics.timeline import record_token_each
from jaxinfer.scheduler import Commit, check_token_stop
from jaxinfer.tokenizer import IncrementalDetokenizer, Tokenizer

type DecodeToken = Callable[[int], str | None]


class Answer:
    """One answer as it grows.

    Args:
      request: the scheduler's side.
      index: which of the n it is.
      tokenizer: None when the model has none; then there is no text.
    """

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer | None) -> None:
        self.request = request
        self.index = index
        self.timeline = Timeline()
        params = request.params
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(tuple(params.stop or ()), include=params.include_stop_str_in_output)
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative = 0.0
        request.is_watched |= self._detokenizer is not None or params.logprobs is not None

    def check_stop(self) -> FinishReason | None:
        """Takes the request's newest token: extends the text, and says whether the answer ends. Without a text, tokens
        that cannot end it need not be shown here.

        End ids first, then stop strings, then length. The text of an ending id is left out unless asked for.
        """
        request, params = self.request, self.request.params
        reason = check_token_stop(request)
        if self._detokenizer is None:
            return reason
        if reason is FinishReason.STOP and not params.include_stop_str_in_output:
            return reason
        new = self._detokenizer.push(request.token_ids[-1])
        may_match = request.num_output_tokens > params.min_tokens
        if self._stops.push(new, may_match=may_match) and reason is not FinishReason.STOP:
            request.stop_reason = self._stops.matched
            return FinishReason.STOP
        return reason

    def add_logprobs(self, tokens: Sequence[int], row: tuple[float, int, Any, Any], decode: DecodeToken) -> None:
        """Keeps a committed row's log-probabilities, where they were asked for."""
        count = self.request.params.logprobs
        if count is None:
            return
        for token in tokens:
            self._logprobs.append(make_logprobs(token, row, count, decode))
            self._cumulative += row[0]

    def finish(self, now: float) -> None:
        """Closes the text and the timeline."""
        if self._detokenizer is not None and self._stops.matched is None:
            self._stops.push(self._detokenizer.flush(), may_match=False)
        self._stops.release()
        self.timeline.finished = now
        self.timeline.num_preemptions = self.request.epoch

    def make_output(self) -> CompletionOutput:
        """The answer as it is now."""
        request = self.request
        wants_logprobs = request.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=self._stops.released,
            token_ids=request.output_token_ids,
            cumulative_logprob=self._cumulative if wants_logprobs else None,
            logprobs=list(self._logprobs) if wants_logprobs else None,
            finish_reason=None if request.finish_reason is None else str(request.finish_reason),
            stop_reason=request.stop_reason,
        )


class RequestState:
    """One request as its caller sees it.

    Args:
      requests: the scheduler's sides, one an answer.
      prompt: its text, where there was one.
      tokenizer: None when the model has none.
      is_streaming: keeps an output for every commit, not only the last.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        prompt: str | None,
        tokenizer: Tokenizer | None,
        *,
        is_streaming: bool = False,
    ) -> None:
        self.answers = [Answer(request, index, tokenizer) for index, request in enumerate(requests)]
        self.prompt = prompt
        self.outputs: deque[RequestOutput] = deque()
        self.error: str | None = None
        self.is_streaming = is_streaming
        for request in requests:
            request.is_watched |= is_streaming
        self._tokenizer = tokenizer
        self._prompt_logprobs: dict[int, dict[int, Logprob]] = {}

    @property
    def request(self) -> Request:
        """The first answer's."""
        return self.answers[0].request

    @property
    def is_finished(self) -> bool:
        return all(answer.request.is_finished for answer in self.answers)

    def add_prompt_logprobs(self, chunk: PromptLogprobs) -> None:
        """Keeps a chunk's; positions that a preemption made it compute again are taken once."""
        count = chunk.request.params.prompt_logprobs
        assert count is not None
        for position, row in enumerate(chunk.rows, start=chunk.start):
            if position not in self._prompt_logprobs:
                token = chunk.request.prompt_token_ids[position]
                self._prompt_logprobs[position] = make_logprobs(token, row, count, self.decode)

    def update(self) -> None:
        """Queues an output if somebody reads them as they come, or if it is the last."""
        if self.is_streaming or self.is_finished:
            self.outputs.append(self.make_output())

    def make_output(self) -> RequestOutput:
        """The request as it is now."""
        request = self.request
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[answer.make_output() for answer in self.answers],
            finished=self.is_finished,
            num_cached_tokens=max(request.num_cached_tokens, 0),
            metrics=self.metrics(),
            error=self.error,
            prompt_logprobs=self._make_prompt_logprobs(),
        )

    def metrics(self) -> RequestMetrics:
        """Times of all answers together."""
        return combine([answer.timeline.summary() for answer in self.answers])

    def decode(self, token: int) -> str | None:
        """One token's text by itself."""
        return None if self._tokenizer is None else self._tokenizer.decode([token], skip_special_tokens=False)

    def _make_prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """One entry a prompt token; the first has none. None until the whole prompt is computed."""
        length = self.request.num_prompt_tokens
        if self.request.params.prompt_logprobs is None or len(self._prompt_logprobs) < length - 1:
            return None
        return [None, *(self._prompt_logprobs[position] for position in range(1, length))]


def deliver(
    commit: Commit,
    logprobs: Sequence[Any] | None,
    live: Mapping[Request, tuple[RequestState, Answer]],
    close: Callable[[Answer], None],
) -> int:
    """Hands a step's tokens to the answers they belong to; the number of tokens.

    Args:
      commit: what the scheduler made of the step.
      logprobs: a row of the plan each, as in `StepResult`.
      live: every request that has not ended.
      close: called with each answer that ends, before its last output is made.
    """
    now = time.perf_counter()
    record_token_each((live[request][1].timeline for request in commit.quiet), now)
    num_tokens = len(commit.quiet)
    changed: dict[RequestState, None] = {}
    for emission in commit.emissions:
        request, tokens = emission.request, emission.token_ids
        state, answer = live[request]
        num_tokens += len(tokens)
        answer.timeline.record_tokens(len(tokens), now)
        if logprobs is not None:
            answer.add_logprobs(tokens, logprobs[emission.row], state.decode)
        if request.finish_reason is FinishReason.ERROR:
            state.error = "no token could be chosen: every logit is -inf, or one is NaN"
        if request.is_finished:
            close(answer)
        if request.is_finished or state.is_streaming:
            changed[state] = None
    for state in changed:
        state.update()
    return num_tokens


def make_logprobs(token: int, row: tuple[float, int, Any, Any], count: int, decode: DecodeToken) -> dict[int, Logprob]:
    """The chosen token's entry first, then the `count` best ones'."""
    chosen, rank, top_ids, top_values = row
    best = {
        int(id_): Logprob(float(value), number + 1, decode(int(id_)))
        for number, (id_, value) in enumerate(zip(top_ids[:count], top_values[:count], strict=True))
    }
    return {token: Logprob(float(chosen), int(rank), decode(token)), **best}
