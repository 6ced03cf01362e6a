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

TEXT_TURNS = 16
"""Steps in which each text that grows in arrears grows once: often enough that the last step has little to do."""

type DecodeToken = Callable[[int], str | None]


class Answer:
    """One answer as it grows.

    Its text grows with every token where that decides something: a stop string may end it, or somebody reads it as it
    comes. Otherwise it grows in arrears, a few tokens at once.

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
        self._num_in_text = 0  # output tokens that the text has taken
        request.is_watched |= bool(params.stop) or params.logprobs is not None

    def check_stop(self) -> FinishReason | None:
        """Whether the answer ends with the request's newest token: end ids first, then stop strings, then length.

        To be called for every token of a watched request; of others, at least for those that may end them.
        """
        request, params = self.request, self.request.params
        reason = check_token_stop(request)
        if self._detokenizer is None or not request.is_watched:
            return reason
        if reason is FinishReason.STOP and not params.include_stop_str_in_output:
            return reason
        if self.extend_text() and reason is not FinishReason.STOP:
            request.stop_reason = self._stops.matched
            return FinishReason.STOP
        return reason

    def extend_text(self) -> bool:
        """The text takes the tokens it has not taken yet; True when a stop string is complete."""
        if self._detokenizer is None:
            return False
        new = self._detokenize(self.request.num_output_tokens)
        return self._stops.push(new, may_match=self._num_in_text > self.request.params.min_tokens)

    def _detokenize(self, num_tokens: int) -> str:
        """The text of the output tokens up to that number which it has not taken yet."""
        assert self._detokenizer is not None
        first = self.request.num_prompt_tokens
        tokens = self.request.token_ids[first + self._num_in_text : first + num_tokens]
        self._num_in_text += len(tokens)
        return "".join(map(self._detokenizer.push, tokens))

    def add_logprobs(self, tokens: Sequence[int], row: tuple[float, int, Any, Any], decode: DecodeToken) -> None:
        """Keeps a committed row's log-probabilities, where they were asked for."""
        count = self.request.params.logprobs
        if count is None:
            return
        for token in tokens:
            self._logprobs.append(make_logprobs(token, row, count, decode))
            self._cumulative += row[0]

    def finish(self, now: float) -> None:
        """Closes the text and the timeline. The text of an ending id is left out unless asked for."""
        if self._detokenizer is not None and self._stops.matched is None:
            request = self.request
            ends_with_id = request.finish_reason is FinishReason.STOP
            is_left_out = ends_with_id and not request.params.include_stop_str_in_output
            rest = self._detokenize(request.num_output_tokens - is_left_out)
            self._stops.push(rest + self._detokenizer.flush(), may_match=False)
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
    turn: int = 0,
) -> int:
    """Hands a step's tokens to the answers they belong to; the number of tokens.

    Args:
      commit: what the scheduler made of the step.
      logprobs: a row of the plan each, as in `StepResult`.
      live: every request that has not ended.
      close: called with each answer that ends, before its last output is made.
      turn: steps so far; says which of the texts that grow in arrears grow now.
    """
    now = time.perf_counter()
    record_token_each((live[request][1].timeline for request in commit.quiet), now)
    for request in commit.quiet[turn % TEXT_TURNS :: TEXT_TURNS]:
        live[request][1].extend_text()
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
