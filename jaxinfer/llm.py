"""The offline interface: `LLM`, with vLLM's names."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from jaxinfer.config import EngineConfig
from jaxinfer.core import RequestOutput, SamplingParams
from jaxinfer.engine import Engine, Replicas, open_engine
from jaxinfer.engine.requests import Prompt
from jaxinfer.engine.state import RequestState
from jaxinfer.tokenizer import Tokenizer

type Messages = Sequence[Mapping[str, Any]]
"""A conversation: {"role": ..., "content": ...} each."""
type Params = SamplingParams | Sequence[SamplingParams] | None
"""One for all prompts, or one a prompt; None takes the model's generation config."""


class LLM:
    """A model ready to generate.

    Args:
      model: a folder with safetensors or an Orbax checkpoint, a GGUF file, a Hub id, or "smollm2", the embedded
        default model.
      on_compile: called with (number of programs, False) before compiling and (0, True) after each; for progress.
      kwargs: fields of `EngineConfig`, or vLLM's names for them.

    In a run of several processes (`jaxinfer.sharding.processes.connect_processes`) every one makes the same `LLM`.
    Process 0 gets it; in the others the call serves process 0 until that closes its own, and then raises `SystemExit`.

    Raises:
      ValueError: an unknown argument, or a model that cannot be loaded.

    Example:
      >>> with LLM("smollm2") as llm:
      ...     print(llm.generate("The capital of France is")[0].outputs[0].text)
    """

    def __init__(
        self, model: str = "smollm2", *, on_compile: Callable[[int, bool], None] | None = None, **kwargs: Any
    ) -> None:
        self.engine = open_engine(EngineConfig.from_kwargs(model=str(model), **kwargs), on_compile)

    @property
    def config(self) -> EngineConfig:
        """The configuration with every automatic value filled in."""
        return self.engine.config

    # -- generating --------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Answers one or several prompts, in their order.

        Args:
          prompts: text, token ids, {"prompt": text} or {"prompt_token_ids": ids} (with a "cache_salt" if wanted), or a
            list of such. A flat list of integers is one prompt.
          sampling_params: one for all, or a list with one a prompt.
          use_tqdm: shows a progress bar on a terminal when there are several prompts.
          priority: one a prompt, smaller is more important; needs `policy="priority"`.

        Raises:
          ValueError: a prompt that cannot be run, named by its number; then none was started.
        """
        states = self._make_all(as_prompt_list(prompts), sampling_params, priority)
        answers = self._answers(states)
        return list(_with_progress(answers, len(states)) if use_tqdm else answers)

    def generate_iter(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: Params = None
    ) -> Iterator[RequestOutput]:
        """As `generate`, yielding each answer, in the order of the prompts, once it is complete."""
        return self._answers(self._make_all(as_prompt_list(prompts), sampling_params, None))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: Params = None,
        *,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        parse_special_tokens: bool = False,
    ) -> list[RequestOutput]:
        """Answers one conversation or several, through the model's chat template.

        Args:
          messages: a conversation, or a list of them.
          sampling_params: as for `generate`.
          use_tqdm: as for `generate`.
          chat_template: Jinja source to use in place of the model's.
          add_generation_prompt: ends the prompt with the beginning of an answer.
          parse_special_tokens: special tokens that stand literally inside a message, such as an end-of-turn mark, are
            that token rather than plain text. Off: a user's text cannot end its turn.

        Raises:
          ValueError: no template, a template that refuses the messages, or what `generate` raises.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        prompts = [
            self.render_chat(conversation, chat_template, add_generation_prompt, parse_special_tokens)  # pyright: ignore[reportArgumentType]
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def render_chat(
        self,
        messages: Messages,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        parse_special_tokens: bool = False,
    ) -> dict[str, Any]:
        """A conversation as a prompt: its text and its ids. Arguments as for `chat`."""
        text, ids = self._tokenizer.encode_chat(
            [dict(message) for message in messages],
            template=chat_template,
            add_generation_prompt=add_generation_prompt,
            parse_special_tokens=parse_special_tokens,
        )
        return {"prompt": text, "prompt_token_ids": ids}

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> RequestStream:
        """Yields the growing answer to one prompt; the last output has `finished` True.

        Closing the iterator, or dropping it, aborts the request. Several streams may be read in turn, and from
        several threads: whoever waits drives the engine.

        Raises:
          ValueError: at the call, for a prompt or parameters that cannot be run.
        """
        state = self.engine.make(prompt, sampling_params or self.get_default_sampling_params(), is_streaming=True)
        return RequestStream(self.engine, state)

    def abort(self, request_id: str) -> bool:
        """Ends a request by its id; False when no such request is live. From any thread."""
        state = self.engine.find(request_id)
        if state is None:
            return False
        self.engine.abort(state)
        return True

    # -- around it ---------------------------------------------------------------------------------

    def check(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> None:
        """Raises the ValueError that running this prompt would raise."""
        self.engine.make(prompt, sampling_params or self.get_default_sampling_params())

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text, as `generate` would see them."""
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def get_tokenizer(self) -> Any:
        """The model's tokenizer as a `transformers.PreTrainedTokenizerFast`."""
        return self._tokenizer.to_transformers()

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of the model's generation config."""
        return self.engine.factory.default_params

    def stats(self) -> dict[str, Any]:
        """Counts and gauges, named after vLLM's metrics."""
        return self.engine.stats().to_dict()

    def reset_prefix_cache(self) -> bool:
        """Forgets all reusable prefixes."""
        return self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Aborts what runs. The arrays go with the object. Of several processes, the others end."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        config, model = self.config, self.engine.model
        tokens = ((config.num_blocks or 1) - 1) * (config.block_size or 0)
        each = f" on each of {self.engine.num_replicas} replicas" if self.engine.num_replicas > 1 else ""
        return (
            f"LLM({config.model!r}: {model.architecture}, {model.num_layers} layers, {config.dtype}, "
            f"max_model_len {config.max_model_len}, cache {tokens} tokens{each})"
        )

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.engine.tokenizer is None:
            raise ValueError("the model has no tokenizer: name one with tokenizer=")
        return self.engine.tokenizer

    def _make_all(
        self, prompts: list[Prompt], sampling_params: Params, priority: Sequence[int] | None
    ) -> list[RequestState]:
        params = sampling_params or self.get_default_sampling_params()
        listed = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        priorities = [0] * len(prompts) if priority is None else list(priority)
        for name, values in (("sampling_params", listed), ("priority", priorities)):
            if len(values) != len(prompts):
                raise ValueError(f"{name} has {len(values)} entries for {len(prompts)} prompts")
        if any(priorities) and self.config.policy != "priority":
            raise ValueError('priority needs LLM(policy="priority")')
        states = []
        for number, (prompt, one, rank) in enumerate(zip(prompts, listed, priorities, strict=True)):
            try:
                states.append(self.engine.make(prompt, one, priority=rank))
            except ValueError as error:
                raise ValueError(f"prompt {number}: {error}") from None
        return states

    def _answers(self, states: list[RequestState]) -> Iterator[RequestOutput]:
        try:
            self.engine.submit(states)
            for state in states:
                while not state.outputs:  # there is one when it has ended
                    drive(self.engine, state)
                yield state.outputs[-1]
        finally:
            self.engine.abandon(*states)


class RequestStream:
    """Iterator over the outputs of one request, which is submitted at once and aborted when nobody wants it.

    A class, not a generator: a generator that was never started would not run its clean-up.
    """

    def __init__(self, engine: Engine | Replicas, state: RequestState) -> None:
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


def drive(engine: Engine | Replicas, state: RequestState) -> None:
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


def _with_progress(answers: Iterator[RequestOutput], count: int) -> Iterator[RequestOutput]:
    """The same answers, with a bar on a terminal when there are several."""
    if count < 2 or not sys.stderr.isatty():
        yield from answers
        return
    from rich.console import Console
    from rich.progress import track

    yield from track(answers, "prompts", total=count, console=Console(stderr=True), transient=True)
