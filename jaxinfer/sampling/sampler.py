"""The two sampling programs: plain (greedy and temperature) and full (every feature).

Both are pure. Order of the pipeline, on float32 logits:

    raw -> allowed ids -> bad words -> min_tokens -> bias -> repetition, frequency, presence -> temperature
        -> min_p -> top_k -> top_p -> choose

A row that uses no feature takes the same token from both programs: the full one passes it by its features, which may
be a former owner's.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxinfer.batch import Carry, Features, LogprobOutput, Rows, StepOutput
from jaxinfer.core import MAX_LOGPROBS
from jaxinfer.sampling import transforms
from jaxinfer.sampling.choose import choose


def sample_plain(carry: Carry, logits: jax.Array, rows: Rows) -> tuple[Carry, StepOutput]:
    """float32 [S, V] -> the carry for the next step, and the tokens."""
    carry_in, positions = _gather(carry, rows)
    scaled = transforms.apply_temperature(logits, carry_in.temperature)
    tokens = choose(scaled, carry_in.temperature, carry_in.seeds, positions)
    is_bad = ~jnp.isfinite(jnp.max(logits, axis=1))
    carry, tokens = _advance(carry, rows, tokens, is_bad)
    return carry, StepOutput(tokens, None)


def sample_full(carry: Carry, features: Features, logits: jax.Array, rows: Rows) -> tuple[Carry, Features, StepOutput]:
    """As `sample_plain`, with all features, the token history, and log-probabilities."""
    carry_in, positions = _gather(carry, rows)
    used = jax.tree.map(lambda table: table.at[rows.slot_ids].get(mode="clip"), features)
    plain = transforms.apply_temperature(logits, carry_in.temperature)
    processed = process(logits, used, positions, carry_in.temperature)
    processed = jnp.where(carry_in.uses_features[:, None], processed, plain)
    tokens = choose(processed, carry_in.temperature, carry_in.seeds, positions)
    is_bad = ~jnp.isfinite(jnp.max(processed, axis=1))
    carry, tokens = _advance(carry, rows, tokens, is_bad)
    target = jnp.where(rows.samples, rows.slot_ids, features.history.shape[0])
    history = features.history.at[target, positions].set(jnp.maximum(tokens, 0), mode="drop")
    features = dataclasses.replace(features, history=history)
    return carry, features, StepOutput(tokens, raw_logprobs(logits, tokens))


def process(logits: jax.Array, features: Features, positions: jax.Array, temperature: jax.Array) -> jax.Array:
    """The whole pipeline up to the choice; the best logit of the result is 0, or NaN where there is none.

    Args:
      logits: float32 [S, V].
      features: each row's, leading axis S.
      positions: int32 [S]: where the token being chosen will stand.
      temperature: float32 [S].
    """
    vocab = logits.shape[1]
    logits = transforms.only_allowed(logits, features.allowed)
    logits = transforms.ban_words(logits, features.bad_words, features.history, positions, features.prompt_lens)
    logits = transforms.not_yet_ending(logits, features.end_ids, positions < features.min_lens)
    logits = transforms.add_bias(logits, features.bias_ids, features.bias_values)
    logits = transforms.penalise(logits, features, positions)
    logits = transforms.apply_temperature(logits, temperature)
    logits = transforms.keep_min_p(logits, features.min_p)
    logits = transforms.keep_top_k(logits, jnp.clip(features.top_k, 1, vocab))
    return transforms.keep_top_p(logits, features.top_p)


def raw_logprobs(logits: jax.Array, tokens: jax.Array) -> LogprobOutput:
    """Log-probabilities of the chosen tokens, int32 [S], and of the best ones, from raw logits [S, V]."""
    total = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    safe = jnp.maximum(tokens, 0)[:, None]
    chosen = jnp.take_along_axis(logits, safe, axis=1)
    ids = jnp.arange(logits.shape[1], dtype=jnp.int32)[None, :]
    better = (logits > chosen) | ((logits == chosen) & (ids < safe))
    ranks = 1 + jnp.sum(better.astype(jnp.int32), axis=1)
    best, best_ids = jax.lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    return LogprobOutput((chosen - total)[:, 0], ranks, best_ids.astype(jnp.int32), best - total)


def _gather(carry: Carry, rows: Rows) -> tuple[Carry, jax.Array]:
    """The rows' part of the carry, and where each row's next token will stand."""
    used = jax.tree.map(lambda table: table.at[rows.slot_ids].get(mode="fill", fill_value=0), carry)
    return used, used.num_computed + rows.num_tokens


def _advance(carry: Carry, rows: Rows, tokens: jax.Array, is_bad: jax.Array) -> tuple[Carry, jax.Array]:
    """Writes tokens and counts back by slot; failed rows say -1 and carry token 0."""
    num_slots = carry.last_tokens.shape[0]
    target = jnp.where(rows.samples, rows.slot_ids, num_slots)
    last = carry.last_tokens.at[target].set(tokens, mode="drop")
    computed = carry.num_computed.at[rows.slot_ids].add(rows.num_tokens, mode="drop")
    carry = dataclasses.replace(carry, last_tokens=last, num_computed=computed)
    return carry, jnp.where(is_bad, -1, tokens)
