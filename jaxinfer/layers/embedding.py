"""Token embedding and the head that reads it back, both cut by vocabulary on a mesh."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxinfer.layers.linear import einsum, param
from jaxinfer.sharding.collectives import all_reduce, axis_index


class Embedding(nnx.Module):
    """One row a token; the same table serves as the head where a model ties them.

    Args:
      num_rows: of the table: the vocabulary, padded so that a mesh divides it.
      hidden: size of a row.
      vocab_size: ids that exist; None is `num_rows`.
      axis_name: the mesh axis that the rows are cut over.
    """

    def __init__(
        self,
        num_rows: int,
        hidden: int,
        *,
        dtype: jnp.dtype,
        vocab_size: int | None = None,
        axis_name: str | None = None,
    ) -> None:
        self.weight = param((num_rows, hidden), dtype, ("vocab", "embed"))
        self.vocab_size, self.num_padding = vocab_size or num_rows, num_rows - (vocab_size or num_rows)
        self.axis_name = axis_name

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """int32 [T] -> [T, hidden]. On a mesh each device gives its own ids' rows, and zeros for the others."""
        table = self.weight[...]
        if self.axis_name is None:
            return table.at[token_ids].get(mode="clip")
        local = token_ids - axis_index(self.axis_name) * table.shape[0]
        is_own = (local >= 0) & (local < table.shape[0])
        rows = table.at[jnp.clip(local, 0, table.shape[0] - 1)].get(mode="clip")
        return all_reduce(jnp.where(is_own[:, None], rows, 0), self.axis_name)


def compute_logits(x: jax.Array, head: Embedding) -> jax.Array:
    """[S, hidden] -> float32 [S, rows of the table on this device]; -inf for ids that do not exist."""
    weight = head.weight[...]
    logits = einsum("te,ve->tv", x, weight, out_dtype=jnp.dtype(jnp.float32))
    return logits if head.num_padding == 0 else _without_padding(logits, head)


def _without_padding(logits: jax.Array, head: Embedding) -> jax.Array:
    """Only the last columns of a device can be padding: the others are not touched."""
    num_columns = logits.shape[1]
    first = num_columns - min(head.num_padding, num_columns)
    ids = axis_index(head.axis_name) * num_columns + jnp.arange(first, num_columns, dtype=jnp.int32)
    last = jnp.where(ids[None, :] < head.vocab_size, logits[:, first:], -jnp.inf)
    return jax.lax.dynamic_update_slice(logits, last, (0, first)) if first else last
