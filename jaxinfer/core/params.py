"""How tokens are chosen and when an answer stops: `SamplingParams`, and the sizes of its lists."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

MAX_LOGIT_BIAS = 512
"""Most `logit_bias` entries of one request (a fixed-size table on the device)."""
MAX_BAD_WORDS = 64
"""Most bad-word token sequences of one request; a word may need two (with and without a leading space)."""
MAX_BAD_WORD_LEN = 16
"""Most tokens in one bad word."""
MAX_END_IDS = 64
"""Most end-of-sequence and stop token ids of one request together."""
MAX_LOGPROBS = 20
"""Most top logprobs a token."""
MAX_SEED = 2**64


def _require(condition: bool, name: str, value: object, rule: str) -> None:
    if not condition:
        raise ValueError(f"{name} must be {rule}, got {value!r}")


def _check_number(name: str, value: Any, low: float, high: float, rule: str) -> None:
    kind: type = numbers.Real
    is_number = isinstance(value, kind) and not isinstance(value, bool)
    _require(is_number and low <= value <= high, name, value, rule)  # NaN fails both comparisons


def _check_int(name: str, value: Any, low: float, high: float, rule: str) -> None:
    kind: type = numbers.Integral
    is_int = isinstance(value, kind) and not isinstance(value, bool)
    _require(is_int and low <= value <= high, name, value, rule)


def _as_tuple(name: str, value: Any, kind: type | None = None) -> tuple:
    if value is None:
        return ()
    if kind is not None and isinstance(value, kind):
        return (value,)
    _require(isinstance(value, Iterable) and not isinstance(value, str | bytes), name, value, "a list")
    return tuple(value)


def _as_token_id(key: Any) -> Any:
    """A key of `logit_bias`; JSON has only strings for keys."""
    return int(key) if isinstance(key, str) and key.isdecimal() else key


@dataclass(kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Checked when made and, since fields may be set, again at submission, where
    ids are checked against the vocabulary too; a request keeps a copy of its own.

    The pipeline's order is in docs/architecture.md. `temperature` 0 is greedy; `top_k` 0 or -1 is off;
    `max_tokens` None means up to the model's length; `logprobs=k` returns the sampled token's and the k best
    raw log-probabilities.

    Raises:
      ValueError: a field is out of its range; the message carries name and value.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        inf = float("inf")
        big = 3.0e38  # the largest magnitude that stays finite in float32
        _check_int("n", self.n, 1, 1024, "an integer between 1 and 1024")
        _check_number("temperature", self.temperature, 0.0, big, "a finite number >= 0")
        _check_number("top_p", self.top_p, math.ulp(0.0), 1.0, "in (0, 1]")
        _check_int("top_k", self.top_k, -1, inf, "-1 or 0 (off) or a positive integer")
        _check_number("min_p", self.min_p, 0.0, 1.0, "in [0, 1]")
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0, "in [-2, 2]")
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0, "in [-2, 2]")
        _check_number("repetition_penalty", self.repetition_penalty, 1e-6, 1e6, "in [1e-6, 1e6]")
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), MAX_SEED - 1, "an integer of at most 64 bits")
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, inf, "a positive integer or None")
        _check_int("min_tokens", self.min_tokens, 0, inf, "an integer >= 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens {self.min_tokens} is beyond max_tokens {self.max_tokens}")
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n must be 1 at temperature 0 (all answers would be the same), got {self.n}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}")
        self._check_lists()

    def _check_lists(self) -> None:
        self.stop = _as_tuple("stop", self.stop, str)
        self.stop_token_ids = _as_tuple("stop_token_ids", self.stop_token_ids)
        self.bad_words = _as_tuple("bad_words", self.bad_words, str)
        for name in ("stop", "bad_words"):
            for text in getattr(self, name):
                _require(isinstance(text, str) and text != "", name, text, "non-empty strings")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True")
        _require(len(self.bad_words or ()) <= MAX_BAD_WORDS, "bad_words", len(self.bad_words or ()),
                 f"at most {MAX_BAD_WORDS} words")  # fmt: skip
        for token in self.stop_token_ids or ():
            _check_int("stop_token_ids", token, 0, 2**31 - 1, "token ids")
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _as_tuple("allowed_token_ids", self.allowed_token_ids)
            _require(len(self.allowed_token_ids) > 0, "allowed_token_ids", [], "non-empty")
            for token in self.allowed_token_ids:
                _check_int("allowed_token_ids", token, 0, 2**31 - 1, "token ids")
        if self.logit_bias is not None:
            _require(isinstance(self.logit_bias, dict), "logit_bias", self.logit_bias, "a dict of id -> bias")
            bias = {_as_token_id(token): value for token, value in self.logit_bias.items()}
            _require(len(bias) <= MAX_LOGIT_BIAS, "logit_bias", len(bias), f"at most {MAX_LOGIT_BIAS} entries")
            for token, value in bias.items():
                _check_int("logit_bias", token, 0, 2**31 - 1, "a dict with token ids as keys")
                _check_number(f"logit_bias[{token}]", value, -1e9, 1e9, "a finite number within +-1e9")
            self.logit_bias = bias

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuses ids outside [0, vocab_size).

        Raises:
          ValueError: names the field, the id and the vocabulary's size.
        """
        listed = {
            "stop_token_ids": self.stop_token_ids or (),
            "allowed_token_ids": self.allowed_token_ids or (),
            "logit_bias": self.logit_bias or (),
        }
        for name, ids in listed.items():
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise ValueError(f"{name}: token id {token} is outside the vocabulary of {vocab_size}")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def uses_cuts(self) -> bool:
        """Whether top-k, top-p or min-p decide anything: the best token always stays."""
        return not self.is_greedy and (self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0)

    @property
    def needs_full_sampler(self) -> bool:
        """Whether temperature and cuts do not suffice."""
        penalties = self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0
        lists = self.logit_bias or self.bad_words or self.allowed_token_ids is not None
        return bool(penalties or lists or self.min_tokens or self.logprobs is not None)
