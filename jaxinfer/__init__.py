"""jaxinfer: an LLM inference engine in JAX and Pallas for GPUs and TPUs."""

from __future__ import annotations

import logging
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxinfer.config import EngineConfig
    from jaxinfer.core import RequestOutput, SamplingParams
    from jaxinfer.llm import LLM

try:
    __version__ = version("jaxinfer")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

logging.getLogger("jaxinfer").addHandler(logging.NullHandler())  # notices are for whoever sets logging up

_LAZY = {
    "LLM": "jaxinfer.llm",
    "EngineConfig": "jaxinfer.config",
    "SamplingParams": "jaxinfer.core",
    "RequestOutput": "jaxinfer.core",
}

__all__ = ["LLM", "EngineConfig", "RequestOutput", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    """Imports on first use (PEP 562): `import jaxinfer` costs nothing, and host code never brings jax along."""
    if name not in _LAZY:
        raise AttributeError(f"module 'jaxinfer' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
