"""Which tokens of which requests the next step computes. Plain Python; no jax."""

from jaxinfer.scheduler.limits import SchedulerLimits, resolve_max_model_len, resolve_max_tokens
from jaxinfer.scheduler.queue import FCFSQueue, PriorityQueue, make_queue
from jaxinfer.scheduler.scheduler import Emission, Scheduler, check_token_stop

__all__ = [
    "Emission",
    "FCFSQueue",
    "PriorityQueue",
    "Scheduler",
    "SchedulerLimits",
    "check_token_stop",
    "make_queue",
    "resolve_max_model_len",
    "resolve_max_tokens",
]
