"""Which tokens of which requests the next step computes. Python and NumPy; no jax."""

from jaxinfer.scheduler.limits import SchedulerLimits, resolve_max_model_len, resolve_max_tokens
from jaxinfer.scheduler.queue import FCFSQueue, PriorityQueue, make_queue
from jaxinfer.scheduler.results import Commit, Emission, check_token_stop
from jaxinfer.scheduler.scheduler import Scheduler

__all__ = [
    "Commit",
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
