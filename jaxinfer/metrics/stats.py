"""Counts and gauges of an engine, named after vLLM's metrics where one exists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Self


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


@dataclass
class ReplicatedStats(EngineStats):
    """Of several engines with the same model and settings: sums, the cache's share of all blocks, the least
    `max_model_len`, and each one's numbers."""

    num_failed_replicas: int = 0
    replicas: list[EngineStats] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Sequence[EngineStats], num_failed: int) -> Self:
        """The engines' numbers together; `num_failed` of them are out of use."""
        totals = {
            name: sum(vars(part)[name] for part in parts)
            for name, value in vars(parts[0]).items()
            if isinstance(value, int | float)
        }
        used = sum(part.kv_cache_usage_perc * part.num_blocks for part in parts)
        same = {"block_size": parts[0].block_size, "kernels": parts[0].kernels}
        same |= {"max_model_len": min(part.max_model_len for part in parts)}
        same |= {"kv_cache_usage_perc": used / max(totals["num_blocks"], 1)}
        return cls(**{**totals, **same}, num_failed_replicas=num_failed, replicas=list(parts))
