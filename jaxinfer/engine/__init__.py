"""The step loop: plan, pack, dispatch, fetch, commit."""

from jaxinfer.engine.engine import Engine
from jaxinfer.engine.replicas import Replicas, open_engine

__all__ = ["Engine", "Replicas", "open_engine"]
