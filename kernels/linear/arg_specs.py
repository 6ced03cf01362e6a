"""Cases of `linear`, shared by its tests and benchmarks, and their inputs."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.kernels.linear.tuning import Product


@dataclasses.dataclass(frozen=True)
class Spec:
    """A product and what stands around it."""

    rows: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    has_norm: bool = False
    has_bias: bool = False
    has_residual: bool = False
    activation: str | None = None
    dtype: str = "bfloat16"

    @property
    def weight_bytes(self) -> int:
        return math.prod((*self.inputs, *self.outputs)) * jnp.dtype(self.dtype).itemsize

    @property
    def product(self) -> Product:
        segments = 1 if self.activation is None else 2
        return Product(self.rows, math.prod(self.inputs), segments, math.prod(self.outputs) // segments, self.has_norm)

    @property
    def result(self) -> tuple[int, ...]:
        return (self.rows, *(self.outputs if self.activation is None else self.outputs[1:]))


@dataclasses.dataclass(frozen=True)
class Model:
    """Sizes of a decoder layer."""

    hidden: int
    kv_heads: int
    group: int
    head_dim: int
    mlp: int


MODELS = {
    "0.6B": Model(1024, 8, 2, 128, 3072),
    "8B": Model(4096, 8, 4, 128, 12288),
    "half 8B": Model(4096, 4, 4, 128, 6144),  # over two devices: norms and sums are all-reduces'
}


def layer(model: Model, rows: int, **changes: Any) -> dict[str, Spec]:
    """The four products of a decoder layer as it computes them."""
    heads = (model.kv_heads, model.group, model.head_dim)
    specs = {
        "qkv": Spec(rows, (model.hidden,), (model.kv_heads, model.group + 2, model.head_dim), has_norm=True),
        "out": Spec(rows, heads, (model.hidden,), has_residual=True),
        "gate_up": Spec(rows, (model.hidden,), (2, model.mlp), has_norm=True, activation="silu"),
        "down": Spec(rows, (model.mlp,), (model.hidden,), has_residual=True),
    }
    return {name: dataclasses.replace(spec, **changes) for name, spec in specs.items()}


BENCHMARKS = {
    f"{name} {product}, {rows} rows": spec
    for name, model in MODELS.items()
    for rows in (16, 32, 64, 128, 192, 256)
    for product, spec in layer(
        model, rows, **({"has_norm": False, "has_residual": False} if name.startswith("half") else {})
    ).items()
}


def make_inputs(spec: Spec, seed: int) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
    """x, the weight, and the arrays among `linear`'s options."""
    keys = iter(jax.random.split(jax.random.key(seed), 5))
    dtype = jnp.dtype(spec.dtype)

    def normal(shape: tuple[int, ...], scale: float = 1.0, mean: float = 0.0) -> jax.Array:
        return (jax.random.normal(next(keys), shape) * scale + mean).astype(dtype)

    fan_in = math.prod(spec.inputs)
    x = normal((spec.rows, *spec.inputs), 3.0 if spec.has_norm else 1.0)
    weight = normal((*spec.inputs, *spec.outputs), fan_in**-0.5)
    options = {}
    if spec.has_norm:
        options["norm_weight"] = normal(spec.inputs, 0.2, 1.0)
    if spec.has_bias:
        options["bias"] = normal(spec.outputs)
    if spec.has_residual:
        options["residual"] = normal(spec.result)
    return x, weight, options


def make_qkv_inputs(
    *,
    rows: int,
    hidden: int,
    kv_heads: int,
    group: int,
    head_dim: int,
    has_bias: bool = False,
    has_norm: bool = True,
    is_normalised: bool = False,
    num_blocks: int = 4,
    block_size: int = 16,
) -> tuple[tuple, dict]:
    """Positional arguments and options of `qkv_rope_kv_update`; the last two rows are padding.

    Args:
      has_norm: of heads.
      is_normalised: x is; no norm comes before the product.
    """
    keys = iter(jax.random.split(jax.random.key(0), 9))

    def normal(shape: tuple[int, ...], scale: float = 1.0, mean: float = 0.0) -> jax.Array:
        return (jax.random.normal(next(keys), shape) * scale + mean).astype(jnp.bfloat16)

    heads = (kv_heads, group + 2, head_dim)
    x, weight = normal((rows, hidden), 3.0), normal((hidden, *heads), hidden**-0.5)
    caches = [normal((num_blocks, kv_heads, block_size, head_dim)) for _ in range(2)]
    angles = jax.random.normal(next(keys), (rows, head_dim // 2))
    slots = np.random.default_rng(0).permutation(np.arange(block_size, num_blocks * block_size))[:rows]
    slots[-2:] = 0
    options = {"norm_weight": None if is_normalised else normal((hidden,), 0.2, 1.0)}
    options["bias"] = normal(heads) if has_bias else None
    norms = [normal((head_dim,), 0.2, 1.0) if has_norm else None for _ in range(2)]
    options |= dict(zip(("q_norm", "k_norm"), norms, strict=True))
    return (x, weight, *caches, jnp.cos(angles), jnp.sin(angles), jnp.asarray(slots, jnp.int32)), options
