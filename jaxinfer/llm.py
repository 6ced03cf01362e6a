"""The offline interface: `LLM`, with vLLM's names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from jaxinfer.config import EngineConfig
from jaxinfer.core import RequestOutput, SamplingParams
from jaxinfer.engine import Engine
from jaxinfer.engine.requests import Prompt
from jaxinfer.engine.state import RequestState


class LLM:
    """A model ready to generate.

    Args:
      model: a folder with safetensors, a GGUF file, or "smollm2", the embedded default model.
      on_compile: called with (number of programs, False) before compiling and (0, True) after each; for progress.
      kwargs: fields of `EngineConfig`, or vLLM's names for them.

    Raises:
      ValueError: an unknown argument, or a model that cannot be loaded.

    Example:
      >>> with LLM("smollm2") as llm:
      ...     print(llm.generate("The capital of France is")[0].outputs[0].text)
    """

    def __init__(
        self, model: str = "smollm2", *, on_compile: Callable[[int, bool], None] | None = None, **kwargs: Any
    ) -> None:
        self.engine = Engine(EngineConfig.from_kwargs(model=str(model), **kwargs), on_compile)

    @property
    def config(self) -> EngineConfig:
        """The configuration with every automatic value filled in."""
        return self.engine.config

    def generate(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> list[RequestOutput]:
        """Answers one or several prompts, in their order.

        Args:
          prompts: text, token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of such. A flat list of
            integers is one prompt.
          params: None takes the model's generation config.

        Raises:
          ValueError: a prompt that cannot be run, named by its number; then none was started.
        """
        return list(self.generate_iter(prompts, params))

    def generate_iter(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """As `generate`, yielding each answer, in the order of the prompts, once it is complete."""
        params = params or self.default_params()
        states = [self._make(number, prompt, params) for number, prompt in enumerate(as_prompt_list(prompts))]
        return self._answers(states)

    def _answers(self, states: list[RequestState]) -> Iterator[RequestOutput]:
        try:
            self.engine.submit(states)
            for state in states:
                while not state.is_finished:
                    drive(self.engine, state)
                yield state.outputs[-1]
        finally:
            self.engine.abandon(*states)

    def check(self, prompt: Prompt, params: SamplingParams | None = None) -> None:
        """Raises the ValueError that running this prompt would raise."""
        self.engine.make(prompt, params or self.default_params())

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> RequestStream:
        """Yields the growing answer to one prompt; the last output has `finished` True.

        Closing the iterator, or dropping it, aborts the request. Several streams may be read in turn, and from
        several threads: whoever waits drives the engine.

        Raises:
          ValueError: at the call, for a prompt or parameters that cannot be run.
        """
        state = self.engine.make(prompt, params or self.default_params(), is_streaming=True)
        return RequestStream(self.engine, state)

    def abort(self, request_id: str) -> bool:
        """Ends a request by its id; False when no such request is live. From any thread."""
        state = self.engine.find(request_id)
        if state is None:
            return False
        self.engine.abort(state)
        return True

    def default_params(self) -> SamplingParams:
        """The sampling parameters of the model's generation config."""
        return self.engine.factory.default_params

    def stats(self) -> dict[str, Any]:
        """Counts and gauges, named after vLLM's metrics."""
        return self.engine.stats().to_dict()

    def reset_prefix_cache(self) -> bool:
        """Forgets all reusable prefixes."""
        return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Aborts what runs. The arrays go with the object."""
        self.engine.abort_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make(self, number: int, prompt: Prompt, params: SamplingParams) -> RequestState:
        try:
            return self.engine.make(prompt, params)
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from None


class RequestStream:
    """Iterator over the outputs of one request, which is submitted at once and aborted when nobody wants it.

    A class, not a generator: a generator that was never started would not run its clean-up.
    """

    def __init__(self, engine: Engine, state: RequestState) -> None:
        self._engine = engine
        self._state = state
        self._is_over = False
        engine.submit([state])

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> RequestOutput:
        while not self._is_over:
            if self._state.outputs:
                output = self._state.outputs.popleft()
                self._is_over = output.finished
                return output
            drive(self._engine, self._state)
        raise StopIteration

    def close(self) -> None:
        """Aborts the request if it has not ended."""
        self._is_over = True
        self._engine.abort(self._state)

    def __del__(self) -> None:
        self._engine.abandon(self._state)


def drive(engine: Engine, state: RequestState) -> None:
    """Steps the engine unless another thread just gave this request something."""
    with engine.lock:
        if state.outputs or state.is_finished:
            return
        engine.step()
    time.sleep(0)  # let a waiting thread have the lock


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many -> a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(item, int) and not isinstance(item, bool) for item in listed):
        return [listed]
    return listed
