"""What a step and a request may be at most, checked where it enters."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.core import SamplingParams


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """A step's budget (`max_num_batched_tokens`), rows of all groups (`max_num_seqs`), a request's length, fairness.

    With several groups, which take turns, a step is one group's; a request stays in the group of its slot, slot number
    modulo `num_groups`. So steps of different groups do not wait for each other's tokens: a pipeline works on as many
    steps at once as it has stages. With `has_late_tokens` the device cannot go on with tokens that the host does not
    know: a group's next step is planned when its last one is committed.

    While shorter work waits, requests that want more than `long_prefill_token_threshold` tokens (None: a quarter
    of the budget) share half of the budget.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    long_prefill_token_threshold: int | None = None
    policy: str = "fcfs"
    num_groups: int = 1
    has_late_tokens: bool = False

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "num_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "every running request needs a token a step"
            )
        if self.long_prefill_token_threshold is not None and self.long_prefill_token_threshold < 1:
            raise ValueError(
                f"long_prefill_token_threshold must be at least 1, got {self.long_prefill_token_threshold}"
            )

    @property
    def long_threshold(self) -> int:
        if self.long_prefill_token_threshold is not None:
            return self.long_prefill_token_threshold
        return max(1, self.max_num_batched_tokens // 4)


def resolve_max_model_len(max_model_len: int | None, model_limit: int, num_cache_tokens: int) -> int:
    """The longest request: what was asked for, or what both the model and the cache can hold.

    Args:
      max_model_len: the user's, or None for automatic.
      model_limit: the model's `max_position_embeddings`.
      num_cache_tokens: tokens that fit in the pool when one request has it all.

    Raises:
      ValueError: the asked length is beyond the model's or the pool's.
    """
    if max_model_len is None:
        return min(model_limit, num_cache_tokens)
    if max_model_len < 2:
        raise ValueError(f"max_model_len must be at least 2 (one prompt and one output token), got {max_model_len}")
    if max_model_len > model_limit:
        raise ValueError(f"max_model_len {max_model_len} is beyond the model's {model_limit} positions")
    if max_model_len > num_cache_tokens:
        raise ValueError(
            f"max_model_len {max_model_len} does not fit in the KV cache of {num_cache_tokens} tokens: "
            "lower it, or raise num_blocks or memory_utilization"
        )
    return max_model_len


def resolve_max_tokens(num_prompt_tokens: int, params: SamplingParams, max_model_len: int) -> int:
    """Output tokens a request may have: `params.max_tokens`, clipped to the room behind the prompt.

    Raises:
      ValueError: the prompt is empty or leaves no room, or `min_tokens` is beyond it.
    """
    if num_prompt_tokens == 0:
        raise ValueError("the prompt is empty")
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise ValueError(
            f"the prompt has {num_prompt_tokens} tokens; with max_model_len {max_model_len} "
            f"it may have at most {max_model_len - 1}"
        )
    if params.min_tokens > room:
        raise ValueError(
            f"min_tokens {params.min_tokens} does not fit: the prompt of {num_prompt_tokens} tokens "
            f"leaves room for {room} (max_model_len {max_model_len})"
        )
    return room if params.max_tokens is None else min(params.max_tokens, room)
