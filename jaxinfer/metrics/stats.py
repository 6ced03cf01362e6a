"""Counts and gauges of an engine, named after vLLM's metrics where one exists."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class EngineStats:
    """A snapshot. Tokens and counts since the start; `kv_cache_usage_perc` is a share of 1."""

    num_requests_running: int = 0
    num_requests_waiting: int = 0
    kv_cache_usage_perc: float = 0.0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_block_copies: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_steps: int = 0
    num_mixed_steps: int = 0
    num_failed_steps: int = 0
    num_programs: int = 0
    num_programs_loaded: int = 0
    compile_seconds: float = 0.0
    num_compiles_while_serving: int = 0
    num_blocks: int = 0
    block_size: int = 0
    max_model_len: int = 0
    kernels: str = ""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
