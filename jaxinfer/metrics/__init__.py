"""Timelines of requests and counts of an engine. No jax."""

from jaxinfer.metrics.stats import EngineStats
from jaxinfer.metrics.timeline import Timeline, combine

__all__ = ["EngineStats", "Timeline", "combine"]
