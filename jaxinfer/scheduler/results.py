"""What a step gave to requests, and whether a token ends one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from jaxinfer.core import FinishReason, Request

type StopCheck = Callable[[Request], FinishReason | None]
"""Called after a token was appended to a request; says whether the request ends with it."""


def check_token_stop(request: Request) -> FinishReason | None:
    """Whether the newest output token ends a request: an end id after `min_tokens`, then the length."""
    if request.num_output_tokens > request.params.min_tokens:
        token = request.token_ids[-1]
        if token in request.eos_token_ids:
            return FinishReason.STOP
        if token in (request.params.stop_token_ids or ()):
            request.stop_reason = token
            return FinishReason.STOP
    return FinishReason.LENGTH if request.num_output_tokens >= request.max_tokens else None


@dataclass(slots=True)
class Emission:
    """What a commit gave one request: its accepted tokens, and its row in the plan."""

    request: Request
    token_ids: list[int]
    row: int


@dataclass(slots=True)
class Commit:
    """What a commit gave: to each of the `quiet` requests one token that does not end it and that nobody waits for; to
    the others their emissions. And which requests ended.
    """

    emissions: list[Emission] = field(default_factory=list)
    quiet: list[Request] = field(default_factory=list)
    ends: list[tuple[Request, FinishReason]] = field(default_factory=list)

    def note_end(self, request: Request, reason: FinishReason | None) -> None:
        """The request is to end, unless there is no reason to."""
        if reason is not None:
            self.ends.append((request, reason))
