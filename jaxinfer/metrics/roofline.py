"""The least time a step can take: its bytes over the device's bandwidth or its operations over its peak.

Counted a step, each byte once: the weights of the layers (of a mixture of experts: those expected to be hit), the head
if a row samples, K and V of every row's context, K and V written, logits written and read again. Activations, block
tables and the sampler are left out: they are small, or could be kept on the chip.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxinfer.config import ModelConfig

LOGITS_ITEMSIZE = 4


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder's dimensions. `intermediate_size` is an expert's width where there are experts."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    tie_word_embeddings: bool = False
    num_experts: int = 0
    num_experts_per_token: int = 0

    @classmethod
    def of(cls, model: ModelConfig) -> ModelShape:
        """A dense model's."""
        return cls(
            hidden_size=model.hidden_size,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            intermediate_size=model.intermediate_size,
            vocab_size=model.vocab_size,
            tie_word_embeddings=model.tie_word_embeddings,
        )

    @property
    def attention_parameters(self) -> int:
        """A layer's projections."""
        return self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def mlp_parameters(self) -> int:
        """A layer's gated feed-forward, or one expert's."""
        return 3 * self.hidden_size * self.intermediate_size

    @property
    def head_parameters(self) -> int:
        return self.hidden_size * self.vocab_size

    @property
    def num_parameters(self) -> int:
        """All matrices, embedding included."""
        layer = self.attention_parameters + max(self.num_experts, 1) * self.mlp_parameters + self._router
        return self.num_layers * layer + self.head_parameters * (1 if self.tie_word_embeddings else 2)

    @property
    def _router(self) -> int:
        return self.hidden_size * self.num_experts

    def parameters_read(self, num_tokens: int) -> float:
        """Parameters of all layers that a step over so many tokens is expected to read."""
        hit = 1.0
        if self.num_experts:
            hit = self.num_experts * (1 - (1 - self.num_experts_per_token / self.num_experts) ** num_tokens)
        return self.num_layers * (self.attention_parameters + self._router + hit * self.mlp_parameters)

    @property
    def parameters_per_token(self) -> int:
        """Parameters of all layers that one token is multiplied with."""
        used = self.num_experts_per_token if self.num_experts else 1
        return self.num_layers * (self.attention_parameters + self._router + used * self.mlp_parameters)

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True, slots=True)
class Roof:
    """What a device can do at most: bytes a second read, and operations a second of matrix products in bf16."""

    bandwidth: float
    peak: float
    source: str  # "measured" or "data sheet"

    @property
    def ridge(self) -> float:
        """Operations a byte above which the matrix units bind."""
        return self.peak / self.bandwidth


ROOFS = {
    "NVIDIA H200": Roof(4.4e12, 790e12, "measured"),
    "NVIDIA H100 80GB HBM3": Roof(3.35e12, 989e12, "data sheet"),
    "NVIDIA A100-SXM4-80GB": Roof(2.04e12, 312e12, "data sheet"),
    "NVIDIA B200": Roof(8.0e12, 2250e12, "data sheet"),
    "TPU v5 lite": Roof(0.82e12, 197e12, "data sheet"),
    "TPU v6 lite": Roof(1.64e12, 918e12, "data sheet"),
    "TPU7x": Roof(7.37e12, 2307e12, "data sheet"),
}
"""By jax's `device_kind`."""


def find_roof(device_kind: str) -> Roof | None:
    """A known device's roof; None for others."""
    return ROOFS.get(device_kind)


@dataclass(slots=True)
class StepWork:
    """What one step has to do, summed over its rows."""

    num_tokens: int = 0  # computed
    num_sampled: int = 0  # rows whose logits are wanted
    kv_tokens_read: int = 0  # the rows' contexts, their new tokens included
    num_pairs: int = 0  # of a query and a key it may see

    def add_decode(self, num_rows: int, context: int) -> None:
        """Rows with one token each, whose contexts have `context` tokens together."""
        self.num_tokens += num_rows
        self.num_sampled += num_rows
        self.kv_tokens_read += context
        self.num_pairs += context

    def add_chunk(self, num_cached: int, num_new: int, *, samples: bool) -> None:
        """A part of a prompt behind `num_cached` tokens."""
        self.num_tokens += num_new
        self.num_sampled += samples
        self.kv_tokens_read += num_cached + num_new
        self.num_pairs += num_new * num_cached + num_new * (num_new + 1) // 2


@dataclass(slots=True)
class StepCost:
    """Bytes and operations of a step, or summed over steps."""

    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    logits_bytes: float = 0.0
    operations: float = 0.0

    @property
    def num_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.logits_bytes

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.operations / self.num_bytes if self.num_bytes else 0.0

    def add(self, other: StepCost) -> None:
        self.weight_bytes += other.weight_bytes
        self.kv_bytes += other.kv_bytes
        self.logits_bytes += other.logits_bytes
        self.operations += other.operations

    def seconds(self, roof: Roof) -> float:
        """The floor: nothing can be done sooner than its bytes come or its operations are through."""
        return max(self.num_bytes / roof.bandwidth, self.operations / roof.peak)

    def to_dict(self) -> dict[str, Any]:
        return {
            "weight_bytes": self.weight_bytes,
            "kv_bytes": self.kv_bytes,
            "logits_bytes": self.logits_bytes,
            "operations": self.operations,
        }


@dataclass(frozen=True, slots=True)
class Precision:
    """Bytes of a weight, and of a value in the KV cache."""

    weights: int = 2
    kv: int = 2


def cost_of(work: StepWork, shape: ModelShape, precision: Precision) -> StepCost:
    """Bytes and operations of one step."""
    if not work.num_tokens:
        return StepCost()
    head = shape.head_parameters if work.num_sampled else 0
    attention = 4 * shape.num_layers * shape.num_heads * shape.head_dim * work.num_pairs
    products = work.num_tokens * shape.parameters_per_token + work.num_sampled * shape.head_parameters
    return StepCost(
        weight_bytes=(shape.parameters_read(work.num_tokens) + head) * precision.weights,
        kv_bytes=(work.kv_tokens_read + work.num_tokens) * shape.kv_bytes_per_token(precision.kv),
        logits_bytes=2 * work.num_sampled * shape.vocab_size * LOGITS_ITEMSIZE,
        operations=2 * products + attention,
    )
