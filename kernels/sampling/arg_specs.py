"""Cases of `sampling`, shared by its tests and benchmarks, and their inputs."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Spec:
    """A batch of logits. Rows take temperatures and cuts in turn, so that kinds mix.

    spread: standard deviation of the logits. levels: they are rounded to this many a unit, which makes ties.
    peak: added to one logit in 1,000, as a language model's candidates stand out.
    """

    num_rows: int
    vocab: int
    temperatures: tuple[float, ...] = (0.0, 1.0)
    min_p: tuple[float, ...] | None = None
    top_k: tuple[int, ...] | None = None
    top_p: tuple[float, ...] | None = None
    spread: float = 2.0
    peak: float = 0.0
    levels: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the logits."""
        return 4 * self.num_rows * self.vocab


class Inputs(NamedTuple):
    """Arguments of `sample`, in its order."""

    logits: jax.Array
    temperature: jax.Array
    seeds: jax.Array
    positions: jax.Array
    min_p: jax.Array | None
    top_k: jax.Array | None
    top_p: jax.Array | None

    @property
    def cuts(self) -> dict[str, jax.Array | None]:
        return {"min_p": self.min_p, "top_k": self.top_k, "top_p": self.top_p}


BENCHMARKS = {
    "greedy 256 x 151,936": Spec(256, 151936, temperatures=(0.0,)),
    "temperature 256 x 151,936": Spec(256, 151936, temperatures=(0.7,)),
    "temperature 64 x 151,936": Spec(64, 151936, temperatures=(0.7,)),
    "temperature 1 x 151,936": Spec(1, 151936, temperatures=(0.7,)),
    "temperature 256 x 49,152": Spec(256, 49152, temperatures=(0.7,)),
    "temperature 256 x 151,669": Spec(256, 151669, temperatures=(0.7,)),
}
CUT_BENCHMARKS = {
    "top-k 50, top-p 0.9, 256 x 151,936": Spec(256, 151936, temperatures=(0.7,), top_k=(50,), top_p=(0.9,)),
    "top-k 50, top-p 0.9, 1 x 151,936": Spec(1, 151936, temperatures=(0.7,), top_k=(50,), top_p=(0.9,)),
    "top-p 0.9, peaked, 256 x 151,936": Spec(256, 151936, temperatures=(0.7,), top_p=(0.9,), peak=12.0),
    "top-p 0.9, peaked, 1 x 151,936": Spec(1, 151936, temperatures=(0.7,), top_p=(0.9,), peak=12.0),
    "top-p 0.9, flat, 256 x 151,936": Spec(256, 151936, temperatures=(1.0,), top_p=(0.9,)),
    "top-k 1,000, 256 x 151,936": Spec(256, 151936, temperatures=(1.0,), top_k=(1000,)),
    "min-p 0.1, 256 x 151,936": Spec(256, 151936, temperatures=(1.0,), min_p=(0.1,), peak=12.0),
}


@partial(jax.jit, static_argnames="shape")
def _make_logits(key: jax.Array, spread: float, peak: float, levels: float, *, shape: tuple[int, int]) -> jax.Array:
    keys = jax.random.split(key, 2)
    logits = jax.random.normal(keys[0], shape, jnp.float32) * spread
    logits += jnp.where(jax.random.uniform(keys[1], shape) < 1e-3, peak, 0.0)
    return jnp.where(levels > 0, jnp.round(logits * levels) / levels, logits)


def make_inputs(spec: Spec, seed: int) -> Inputs:
    """Fresh random logits, seeds and positions."""
    rng = np.random.default_rng(seed)
    shape, kind = (spec.num_rows, spec.vocab), (spec.spread, spec.peak, float(spec.levels or 0))

    def column(values: tuple | None, dtype: type) -> jax.Array | None:
        return None if values is None else jnp.asarray(np.resize(np.asarray(values, dtype), spec.num_rows))

    temperature = column(spec.temperatures, np.float32)
    assert temperature is not None
    return Inputs(
        _make_logits(jax.random.key(seed), *kind, shape=shape),
        temperature,
        jnp.asarray(rng.integers(0, 2**32, (spec.num_rows, 2), np.uint32)),
        jnp.asarray(rng.integers(0, 100_000, spec.num_rows, np.int32)),
        column(spec.min_p, np.float32),
        column(spec.top_k, np.int32),
        column(spec.top_p, np.float32),
    )
