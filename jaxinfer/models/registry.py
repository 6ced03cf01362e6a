"""Architecture name -> family. A family is supported when it has a golden test against transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jaxinfer.config import Kernels, ModelConfig
from jaxinfer.models import llama, mistral, qwen2, qwen3
from jaxinfer.models.dense import DenseModel
from jaxinfer.models.hf_config import ConfigReader
from jaxinfer.models.hf_weights import Sources, dense_sources
from jaxinfer.models.partition import Partition, divide


@dataclass(frozen=True)
class Family:
    """How to read a family's configuration and where its weights are."""

    architecture: str
    parse_config: Callable[[ConfigReader], ModelConfig]
    sources: Callable[[Partition], Sources] = dense_sources


FAMILIES = {
    family.architecture: family
    for family in (
        Family(llama.ARCHITECTURE, llama.parse_config),
        Family(mistral.ARCHITECTURE, mistral.parse_config),
        Family(qwen2.ARCHITECTURE, qwen2.parse_config),
        Family(qwen3.ARCHITECTURE, qwen3.parse_config),
    )
}


def supported_architectures() -> tuple[str, ...]:
    return tuple(FAMILIES)


def find_family(architectures: list[str] | None) -> Family:
    """The family of a config.json's `architectures`.

    Raises:
      ValueError: none, or one that is not supported.
    """
    for name in architectures or ():
        if name in FAMILIES:
            return FAMILIES[name]
    raise ValueError(
        f"architecture {', '.join(architectures or ['(none given)'])} is not supported; "
        f"supported are {', '.join(FAMILIES)}"
    )


def parse_config(
    config: dict[str, Any],
    generation_config: dict[str, Any] | None = None,
    overrides: dict[str, Any] | None = None,
) -> ModelConfig:
    """config.json (with overrides; None removes a key) and generation_config.json -> `ModelConfig`.

    Raises:
      ValueError: what is unknown, missing or unsupported, by name.
    """
    merged = {**config, **(overrides or {})}
    merged = {key: value for key, value in merged.items() if not (key in (overrides or {}) and value is None)}
    family = find_family(merged.get("architectures"))
    parsed = family.parse_config(ConfigReader(merged))
    generation = generation_config or {}
    eos = generation.get("eos_token_id") or ()
    more = (eos,) if isinstance(eos, int) else tuple(eos)
    ids = tuple(dict.fromkeys([*parsed.eos_token_ids, *more]))
    return replace(parsed, eos_token_ids=ids, generation_defaults=generation)


def build_model(config: ModelConfig | Partition, dtype: str, kernels: Kernels | str = "reference") -> DenseModel:
    """The abstract model or stage, for one device or as a mesh has it: shapes and axes, no arrays. See `DenseModel`."""
    cut = divide(config, None) if isinstance(config, ModelConfig) else config
    options: dict[str, Any] = {
        "kernels": kernels,
        "vocab_size": cut.model.vocab_size,
        "axis_name": cut.axis_name,
        "is_first": cut.is_first,
        "is_last": cut.is_last,
    }
    return nnx.eval_shape(lambda: DenseModel(cut.whole, dtype=jnp.dtype(dtype), **options))
