"""What a caller hands in, checked and made into a `Request`."""

from __future__ import annotations

import dataclasses
import numbers
import random
from collections.abc import Mapping, Sequence
from typing import Any

from jaxinfer.config import ModelConfig
from jaxinfer.core import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_END_IDS, Request, SamplingParams
from jaxinfer.scheduler import resolve_max_tokens
from jaxinfer.tokenizer import Tokenizer

type Prompt = str | Sequence[int] | Mapping[str, Any]


class RequestFactory:
    """Makes requests for one model; refuses bad ones before anything is allocated.

    Args:
      model: its vocabulary and end-of-sequence ids.
      tokenizer: None when there is none; then prompts are ids.
      max_model_len: the longest request.
      seed: of the seeds that requests without one get.
    """

    def __init__(self, model: ModelConfig, tokenizer: Tokenizer | None, max_model_len: int, seed: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._seeds = random.Random(seed)
        self._arrivals = self._num_made = 0
        ids = {*model.eos_token_ids, *(tokenizer.eos_token_ids if tokenizer else ())}
        self._eos_token_ids = frozenset(id_ for id_ in ids if 0 <= id_ < model.vocab_size)

    @property
    def default_params(self) -> SamplingParams:
        """What the model's generation config says, where the caller says nothing."""
        config = self._model.generation_defaults
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        chosen: dict[str, Any] = {name: config[name] for name in names if config.get(name) is not None}
        if config.get("do_sample") is False:
            chosen["temperature"] = 0.0
        if config.get("max_new_tokens") is not None:
            chosen["max_tokens"] = config["max_new_tokens"]
        return SamplingParams(**chosen)

    def make(
        self, prompt: Prompt, params: SamplingParams, *, priority: int = 0, request_id: str | None = None
    ) -> tuple[list[Request], str | None]:
        """A request, as `params.n` siblings of which the first leads, and its prompt's text.

        Raises:
          ValueError: an empty, too long or malformed prompt, or parameters that do not fit the model.
        """
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
        if isinstance(priority, bool) or not isinstance(priority, numbers.Integral):
            raise ValueError(f"priority must be an integer, got {priority!r}")
        params = dataclasses.replace(params)  # checks it again; the caller may change the original
        text, token_ids, salt = self._read_prompt(prompt)
        vocab = self._model.vocab_size
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab):
            token = next(token for token in token_ids if not 0 <= token < vocab)
            raise ValueError(f"prompt: token id {token} is outside the vocabulary of {vocab}")
        params.check_vocabulary(vocab)
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        num_end_ids = len(eos.union(params.stop_token_ids or ()))
        if num_end_ids > MAX_END_IDS:
            raise ValueError(f"stop_token_ids: {num_end_ids} end ids in all; at most {MAX_END_IDS} are possible")
        self._check_text_features(params)
        bad_words = self._bad_word_ids(params)
        first = Request(
            request_id=request_id or f"request-{self._num_made}",
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=resolve_max_tokens(len(token_ids), params, self._max_model_len),
            arrival=self._arrivals,
            priority=int(priority),
            cache_salt=salt,
            eos_token_ids=eos,
            bad_word_ids=bad_words,
        )
        _check_allowed(first)
        first.seed = (self._seeds.getrandbits(64) if params.seed is None else int(params.seed)) % 2**64
        self._num_made += 1
        self._arrivals += params.n
        return [first, *(_sibling(first, index) for index in range(1, params.n))], text

    def _read_prompt(self, prompt: Prompt) -> tuple[str | None, list[int], str]:
        salt = ""
        if isinstance(prompt, Mapping):
            unknown = sorted(set(prompt) - {"prompt", "prompt_token_ids", "cache_salt"})
            if unknown:
                raise ValueError(f"prompt: unknown key {unknown[0]!r}")
            salt = str(prompt.get("cache_salt") or "")
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if text is not None and not isinstance(text, str):
                raise ValueError(f"prompt must be text, got {type(text).__name__}")
            if ids is not None:
                return text, _token_ids(ids), salt
            prompt = "" if text is None else text
        if not isinstance(prompt, str):
            return None, _token_ids(prompt), salt
        if self._tokenizer is None:
            raise ValueError("the model has no tokenizer: give token ids, or name one with tokenizer=")
        if not prompt:
            raise ValueError("the prompt is empty")
        return prompt, self._tokenizer.encode(prompt), salt

    def _check_text_features(self, params: SamplingParams) -> None:
        if self._tokenizer is None and (params.stop or params.bad_words):
            raise ValueError("stop and bad_words need a tokenizer, and the model has none")

    def _bad_word_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Each word as it stands at the start of a text and behind a space."""
        if not params.bad_words or self._tokenizer is None:
            return ()
        found: dict[tuple[int, ...], None] = {}
        for word in params.bad_words:
            for text in (word.lstrip(), " " + word.lstrip()):
                ids = tuple(self._tokenizer.encode(text, add_special_tokens=False))
                if len(ids) > MAX_BAD_WORD_LEN:
                    raise ValueError(
                        f"bad_words: {word!r} has {len(ids)} tokens; at most {MAX_BAD_WORD_LEN} are possible"
                    )
                if ids:
                    found[ids] = None
        if len(found) > MAX_BAD_WORDS:
            raise ValueError(f"bad_words: {len(found)} token sequences; at most {MAX_BAD_WORDS} are possible")
        return tuple(found)


def _sibling(leader: Request, index: int) -> Request:
    """Answer `index` of the same prompt: its own seed, the leader's prompt blocks."""
    return Request(
        request_id=f"{leader.request_id}-{index}",
        prompt_token_ids=leader.prompt_token_ids,
        params=dataclasses.replace(leader.params, prompt_logprobs=None),
        max_tokens=leader.max_tokens,
        arrival=leader.arrival + index,
        priority=leader.priority,
        cache_salt=leader.cache_salt,
        seed=(leader.seed + index) % 2**64,
        eos_token_ids=leader.eos_token_ids,
        bad_word_ids=leader.bad_word_ids,
        leader=leader,
    )


def _token_ids(value: Any) -> list[int]:
    if isinstance(value, bytes | str) or not hasattr(value, "__iter__"):
        raise ValueError(f"prompt must be text, token ids or a dict of them, got {type(value).__name__}")
    ids = list(value)
    if set(map(type, ids)) == {int}:  # what is usual takes 15 ns a token
        return ids
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, numbers.Integral):
            raise ValueError(f"prompt: {token!r} is not a token id")
    return [int(token) for token in ids]


def _check_allowed(request: Request) -> None:
    """Refuses a set of allowed tokens from which nothing can ever be chosen."""
    allowed = request.params.allowed_token_ids
    if allowed is None:
        return
    banned = {word[0] for word in request.bad_word_ids if len(word) == 1}
    if request.params.min_tokens:
        banned |= request.end_token_ids
    if not set(allowed) - banned:
        raise ValueError(f"allowed_token_ids {sorted(allowed)[:8]}: all are banned by bad_words or min_tokens")
