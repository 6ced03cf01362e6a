"""Cases of `all_reduce`, shared by its tests and benchmarks, and their inputs."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Spec:
    """A message: a row a token."""

    rows: int
    hidden: int
    dtype: str = "bfloat16"

    @property
    def message_bytes(self) -> int:
        return self.rows * self.hidden * jnp.dtype(self.dtype).itemsize


DECODE = tuple(Spec(rows, 4096) for rows in (1, 8, 32, 64, 256))
"""What a decoder layer of an 8B model reduces."""
WIDTHS = (Spec(3, 2560), Spec(17, 1024), Spec(64, 8192), Spec(2, 256), Spec(5, 4096, "float16"))
"""Rows that threads hold in vectors of 2, 4 and 8 elements."""


def parts(spec: Spec, ranks: int, seed: int = 0) -> jax.Array:
    """[ranks, rows, hidden]: what each rank adds. Many are -0, alone and in twos, which messages must not contain."""
    values = np.random.default_rng(seed).standard_normal((ranks, spec.rows, spec.hidden)).astype(np.float32)
    values[..., ::7] = values[..., 1::7] = -0.0
    return jnp.asarray(values, spec.dtype)
