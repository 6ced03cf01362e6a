"""A request and its progress."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum

from jaxinfer.core.params import SamplingParams


class FinishReason(StrEnum):
    """Why a request ended. Every request ends with exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(Enum):
    """Where a request is. PREEMPTED is WAITING with emitted tokens to replay."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


# A request's counts, in this order: in a list of its own, or, while it runs, in the scheduler's table of columns.
# (The first four are neighbours: a step raises all of them, and all but the first fall when it comes back.)
COMPUTED, IN_FLIGHT, PLACEHOLDERS, SAMPLES, DRAFTS = range(5)
NUM_COUNTS = 5


@dataclass(eq=False, slots=True)
class Request:
    """One request and its progress. Compared by identity: an id may be used again, an object never is.

    Who writes a field is said beside it: the engine fills it at submission, after which only the scheduler changes
    counts and state.
    """

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int  # resolved and clipped to the room
    arrival: int = 0  # submission order; ties of priority fall back to it
    priority: int = 0  # smaller is more important
    cache_salt: str = ""
    seed: int = 0  # resolved: drawn at submission when the caller gave none
    eos_token_ids: frozenset[int] = frozenset()  # empty under ignore_eos
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    leader: Request | None = None  # of the siblings of n > 1, the one whose prompt blocks are to be forked
    is_watched: bool = False  # somebody has to see each token as it comes (text, logprobs, a stream)

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] = field(default_factory=list)  # prompt + output known to the host
    epoch: int = 0  # preemptions so far
    slot: int = -1  # row of the device's tables while running
    tenure: int = -1  # number of its stay in that slot: no two stays of any requests share one
    block_ids: list[int] = field(default_factory=list)
    num_cached_tokens: int = -1  # prefix tokens reused at first admission; -1 before it
    counts: list[int] | memoryview[int] = field(default_factory=lambda: [0] * NUM_COUNTS, repr=False)

    def __post_init__(self) -> None:
        if not self.token_ids:
            self.token_ids = list(self.prompt_token_ids)

    # -- counts -----------------------------------------------------------------------------------

    @property
    def num_computed_tokens(self) -> int:
        """An upper bound where drafts are in flight."""
        return self.counts[COMPUTED]

    @num_computed_tokens.setter
    def num_computed_tokens(self, value: int) -> None:
        self.counts[COMPUTED] = value

    @property
    def num_in_flight_tokens(self) -> int:
        """Scheduled, not yet committed."""
        return self.counts[IN_FLIGHT]

    @num_in_flight_tokens.setter
    def num_in_flight_tokens(self, value: int) -> None:
        self.counts[IN_FLIGHT] = value

    @property
    def num_output_placeholders(self) -> int:
        """Output tokens, drafts included, that steps in flight are to return."""
        return self.counts[PLACEHOLDERS]

    @num_output_placeholders.setter
    def num_output_placeholders(self, value: int) -> None:
        self.counts[PLACEHOLDERS] = value

    @property
    def num_in_flight_samples(self) -> int:
        """Steps in flight that sample a token of it."""
        return self.counts[SAMPLES]

    @num_in_flight_samples.setter
    def num_in_flight_samples(self, value: int) -> None:
        self.counts[SAMPLES] = value

    @property
    def num_drafts(self) -> int:
        """Draft tokens to verify in the next step."""
        return self.counts[DRAFTS]

    @num_drafts.setter
    def num_drafts(self, value: int) -> None:
        self.counts[DRAFTS] = value

    # -- what follows from the lists --------------------------------------------------------------

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[len(self.prompt_token_ids) :]

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Every id that ends this request: end-of-sequence ids and `stop_token_ids`."""
        return self.eos_token_ids.union(self.params.stop_token_ids or ())
