"""The host's vocabulary: what a request is, what a step plan says, what comes back. No jax here.

Names and defaults follow vLLM's.
"""

from jaxinfer.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from jaxinfer.core.params import (
    MAX_BAD_WORD_LEN,
    MAX_BAD_WORDS,
    MAX_END_IDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_SEED,
    SamplingParams,
)
from jaxinfer.core.plan import DecodeRows, PlanRow, PromptLogprobs, StepPlan, StepResult
from jaxinfer.core.request import FinishReason, Request, RequestStatus

__all__ = [
    "MAX_BAD_WORDS",
    "MAX_BAD_WORD_LEN",
    "MAX_END_IDS",
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_SEED",
    "CompletionOutput",
    "DecodeRows",
    "FinishReason",
    "Logprob",
    "PlanRow",
    "PromptLogprobs",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "RequestStatus",
    "SamplingParams",
    "StepPlan",
    "StepResult",
]
