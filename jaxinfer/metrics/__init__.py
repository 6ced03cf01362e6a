"""Timelines of requests and counts of an engine. No jax."""

from jaxinfer.metrics.stats import EngineStats, ReplicatedStats
from jaxinfer.metrics.timeline import Timeline, combine

__all__ = ["EngineStats", "ReplicatedStats", "Timeline", "combine"]
