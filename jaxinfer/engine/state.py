"""What the engine keeps of a request beside the scheduler's counters: its text, logprobs, times and outputs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from jaxinfer.core import CompletionOutput, FinishReason, Logprob, Request, RequestOutput
from jaxinfer.engine.text import StopStrings
from jaxinfer.metrics import Timeline
from jaxinfer.scheduler import check_token_stop
from jaxinfer.tokenizer import IncrementalDetokenizer, Tokenizer


class RequestState:
    """One request as its caller sees it.

    Args:
      request: the scheduler's side.
      prompt: its text, where there was one.
      tokenizer: None when the model has none; then there is no text.
      is_streaming: keeps an output for every commit, not only the last.
    """

    def __init__(
        self, request: Request, prompt: str | None, tokenizer: Tokenizer | None, *, is_streaming: bool = False
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.timeline = Timeline()
        self.outputs: deque[RequestOutput] = deque()
        self.error: str | None = None
        self.is_streaming = is_streaming
        params = request.params
        self._tokenizer = tokenizer
        self._detokenizer = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopStrings(tuple(params.stop or ()), include=params.include_stop_str_in_output)
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative = 0.0

    @property
    def is_finished(self) -> bool:
        return self.request.is_finished

    def check_stop(self) -> FinishReason | None:
        """Takes the request's newest token: extends the text, and says whether the request ends.

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

    def add_logprobs(self, tokens: Sequence[int], row: tuple[float, int, Any, Any]) -> None:
        """Keeps a committed row's log-probabilities, where they were asked for."""
        count = self.request.params.logprobs
        if count is None:
            return
        sampled, rank, top_ids, top_values = row
        for token in tokens:
            best = {
                int(id_): Logprob(float(value), number + 1, self._decode(int(id_)))
                for number, (id_, value) in enumerate(zip(top_ids[:count], top_values[:count], strict=True))
            }
            self._logprobs.append({token: Logprob(sampled, rank, self._decode(token)), **best})
            self._cumulative += sampled

    def finish(self, now: float) -> None:
        """Closes the text and the timeline, and queues the last output."""
        if self._detokenizer is not None and self._stops.matched is None:
            self._stops.push(self._detokenizer.flush(), may_match=False)
        self._stops.release()
        self.timeline.finished = now
        self.timeline.num_preemptions = self.request.epoch
        self.outputs.append(self.make_output())

    def make_output(self) -> RequestOutput:
        """The request as it is now."""
        request = self.request
        wants_logprobs = request.params.logprobs is not None
        completion = CompletionOutput(
            index=0,
            text=self._stops.released,
            token_ids=request.output_token_ids,
            cumulative_logprob=self._cumulative if wants_logprobs else None,
            logprobs=list(self._logprobs) if wants_logprobs else None,
            finish_reason=None if request.finish_reason is None else str(request.finish_reason),
            stop_reason=request.stop_reason,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[completion],
            finished=request.is_finished,
            num_cached_tokens=max(request.num_cached_tokens, 0),
            metrics=self.timeline.summary(),
            error=self.error,
        )

    def _decode(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode([token], skip_special_tokens=False)
