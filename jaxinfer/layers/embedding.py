"""Token embedding and the head that reads it back."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.layers.linear import einsum, param


class Embedding(nnx.Module):
    """One row a token; the same table serves as the head where a model ties them."""

    def __init__(self, vocab_size: int, hidden: int, *, dtype: jnp.dtype) -> None:
        self.weight = param((vocab_size, hidden), dtype, ("vocab", "embed"))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """int32 [T] -> [T, hidden]."""
        return self.weight[...].at[token_ids].get(mode="clip")


def compute_logits(x: jax.Array, head: Embedding) -> jax.Array:
    """[S, hidden] -> float32 [S, vocab]."""
    return einsum("te,ve->tv", x, head.weight[...], out_dtype=jnp.dtype(jnp.float32))
