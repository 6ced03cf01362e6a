"""The step loop: plan, pack, dispatch, fetch, commit."""

from jaxinfer.engine.engine import Engine

__all__ = ["Engine"]
