"""The transforms, each [S, V] -> [S, V] in float32, in the order in which `process` applies them.

`-inf` means "never". Where only some rows use a feature, the others' values pass through unchanged to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxinfer.batch import Features
from jaxinfer.core import MAX_BAD_WORD_LEN

NEVER = -jnp.inf
MIN_TEMPERATURE = 1e-6
"""Smaller temperatures act like this one: 1 / T stays finite, and a gap of 1e-4 already decides."""


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


def apply_temperature(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """(logits - their maximum) / temperature: the best is 0 at any temperature. Greedy rows are only shifted."""
    shifted = logits - jnp.max(logits, axis=1, keepdims=True)
    divisor = jnp.where(temperature > 0, jnp.maximum(temperature, MIN_TEMPERATURE), 1.0)
    return shifted / divisor[:, None]


def keep_min_p(logits: jax.Array, min_p: jax.Array) -> jax.Array:
    """Keeps the ids whose probability is at least `min_p` times the best one's. The best logit is 0."""
    return jnp.where(logits >= jnp.log(min_p)[:, None], logits, NEVER)


def keep_top_k(logits: jax.Array, top_k: jax.Array) -> jax.Array:
    """Keeps exactly the `top_k` best, int32 [S], in the order (logit descending, id ascending)."""
    keys = _ordered(logits)
    # The k-th largest key: the largest threshold that at least k keys reach, found bit by bit.
    threshold = _search(
        lambda bound: jnp.sum((keys >= bound[:, None]).astype(jnp.int32), axis=1) >= top_k, logits.shape[0]
    )
    above, ties = keys > threshold[:, None], keys == threshold[:, None]
    room = top_k - jnp.sum(above.astype(jnp.int32), axis=1)
    first_ties = ties & (jnp.cumsum(ties.astype(jnp.int32), axis=1) <= room[:, None])
    return jnp.where(above | first_ties, logits, NEVER)


def keep_top_p(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """Keeps an id iff the mass strictly before it, in the order of `keep_top_k`, is below `top_p` of the whole."""
    keys = _ordered(logits)
    weights = jnp.exp(logits)  # the best logit is 0
    bound = top_p * jnp.sum(weights, axis=1)

    def mass_from(threshold: jax.Array, *, strictly: bool) -> jax.Array:
        inside = keys > threshold[:, None] if strictly else keys >= threshold[:, None]
        return jnp.sum(jnp.where(inside, weights, 0.0), axis=1)

    # The smallest key that is kept: the largest threshold from which on the mass reaches the bound.
    threshold = _search(lambda candidate: mass_from(candidate, strictly=False) >= bound, logits.shape[0])
    above, ties = keys > threshold[:, None], keys == threshold[:, None]
    tie_weight = jnp.max(jnp.where(ties, weights, 0.0), axis=1)
    mass_before = mass_from(threshold, strictly=True)[:, None] + (
        (jnp.cumsum(ties.astype(jnp.float32), axis=1) - 1.0) * tie_weight[:, None]
    )
    kept = jnp.where(above | (ties & (mass_before < bound[:, None])), logits, NEVER)
    return jnp.where(top_p[:, None] < 1.0, kept, logits)


def _ordered(logits: jax.Array) -> jax.Array:
    """float32 -> uint32 with the same order; -0.0 and 0.0 are equal."""
    bits = jax.lax.bitcast_convert_type(logits + 0.0, jnp.uint32)
    is_negative = bits >> 31 != 0
    return jnp.where(is_negative, ~bits, bits | jnp.uint32(0x80000000))


def _search(holds: Callable[[jax.Array], jax.Array], num_rows: int) -> jax.Array:
    """The largest uint32 threshold a row for which `holds` (true for small ones); 0 where it never does."""

    def try_bit(number: jax.Array, threshold: jax.Array) -> jax.Array:
        candidate = threshold | (jnp.uint32(0x80000000) >> number.astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, threshold)

    return jax.lax.fori_loop(0, 32, try_bit, jnp.zeros((num_rows,), jnp.uint32))
