"""The transforms before the temperature, each [S, V] -> [S, V] in float32, in the order in which they are applied.

`-inf` means "never". Where only some rows use a feature, the others' values pass through unchanged to the bit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.batch import Features
from jaxinfer.core import MAX_BAD_WORD_LEN

NEVER = -jnp.inf


def only_allowed(logits: jax.Array, masks: jax.Array) -> jax.Array:
    """Keeps the ids whose bit is set in `masks`, int32 [S, ceil(V / 32)]."""
    vocab = logits.shape[1]
    bits = (masks[:, :, None] >> jnp.arange(32, dtype=jnp.int32)[None, None, :]) & 1
    return jnp.where(bits.reshape(masks.shape[0], -1)[:, :vocab] != 0, logits, NEVER)


def ban_words(
    logits: jax.Array, words: jax.Array, history: jax.Array, positions: jax.Array, prompt_lens: jax.Array
) -> jax.Array:
    """Bans the last token of each bad word whose other tokens are the output's last ones.

    Args:
      words: int32 [S, words, length], aligned right, -1 before a word's first token.
      history: int32 [S, L].
      positions: int32 [S]: where the token being chosen will stand.
      prompt_lens: int32 [S]: a match must lie in the output.
    """
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)
    before = positions[:, None] + jnp.arange(1 - MAX_BAD_WORD_LEN, 0, dtype=jnp.int32)[None, :]
    tail = history.at[rows[:, None], jnp.maximum(before, 0)].get(mode="clip")
    is_output = before >= prompt_lens[:, None]
    heads, lasts = words[:, :, :-1], words[:, :, -1]
    matches = jnp.where(heads >= 0, (heads == tail[:, None, :]) & is_output[:, None, :], True)
    banned = jnp.where(jnp.all(matches, axis=2) & (lasts >= 0), lasts, logits.shape[1])
    return logits.at[rows[:, None], banned].set(NEVER, mode="drop")


def not_yet_ending(logits: jax.Array, end_ids: jax.Array, is_too_early: jax.Array) -> jax.Array:
    """Bans end ids, int32 [S, n] (V where unused), in rows that are below `min_tokens`, bool [S]."""
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return logits.at[rows, jnp.where(is_too_early[:, None], end_ids, logits.shape[1])].set(NEVER, mode="drop")


def add_bias(logits: jax.Array, ids: jax.Array, values: jax.Array) -> jax.Array:
    """Adds `values` [S, n] at `ids` [S, n] (V where unused)."""
    rows = jnp.arange(logits.shape[0], dtype=jnp.int32)[:, None]
    return logits.at[rows, ids].add(values, mode="drop")


def count_tokens(
    history: jax.Array, positions: jax.Array, prompt_lens: jax.Array, vocab: int
) -> tuple[jax.Array, jax.Array]:
    """How often each id stands in the output, int32 [S, V], and whether it stands in prompt or output, bool."""
    num_rows, longest = history.shape
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    where = jnp.arange(longest, dtype=jnp.int32)[None, :]
    exists = where < positions[:, None]
    is_output = exists & (where >= prompt_lens[:, None])
    zeros = jnp.zeros((num_rows, vocab), jnp.int32)
    counts = zeros.at[rows, history].add(is_output.astype(jnp.int32), mode="drop")
    in_prompt = zeros.at[rows, history].max((exists & ~is_output).astype(jnp.int32), mode="drop")
    return counts, (counts + in_prompt) > 0


def penalise(logits: jax.Array, features: Features, positions: jax.Array) -> jax.Array:
    """Repetition (prompt and output), then frequency and presence (output only)."""
    counts, seen = count_tokens(features.history, positions, features.prompt_lens, logits.shape[1])
    factor = features.repetition_penalty[:, None]
    scaled = jnp.where(logits > 0, logits / factor, logits * factor)
    logits = jnp.where(seen & (factor != 1.0), scaled, logits)
    frequency, presence = features.frequency_penalty[:, None], features.presence_penalty[:, None]
    penalty = frequency * counts.astype(jnp.float32) + presence * (counts > 0).astype(jnp.float32)
    return jnp.where(counts > 0, logits - penalty, logits)
