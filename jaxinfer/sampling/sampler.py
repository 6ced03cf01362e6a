"""The sampling programs: plain (greedy and temperature), cut (and min-p, top-k, top-p) and full (every feature).

All are pure. Order of the pipeline, on float32 logits:

    raw -> allowed ids -> bad words -> min_tokens -> bias -> repetition, frequency, presence -> temperature
        -> min_p -> top_k -> top_p -> choose

A row takes the same token from every program that has what it uses. The cuts lie in the carry, other features in tables
of their own: a row that uses none of those is passed by its slot's, which may be a former owner's.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxinfer.batch import Carry, Features, LogprobOutput, Rows, StepOutput
from jaxinfer.core import MAX_LOGPROBS
from jaxinfer.kernels.sampling import Slots, reference, sample, sample_sharded, sample_slots
from jaxinfer.sampling import transforms
from jaxinfer.sharding.collectives import columns_to_rows, gather_rows, own_rows


def sample_plain(
    carry: Carry,
    logits: jax.Array,
    rows: Rows,
    *,
    vocab_size: int | None = None,
    implementation: str = "reference",
    axis_name: str | None = None,
) -> tuple[Carry, StepOutput]:
    """float32 [S, V] -> the carry for the next step, and the tokens.

    Args:
      vocab_size: not needed here; without what pads it for a mesh.
      implementation: of `kernels/sampling`.
      axis_name: the mesh axis that V is cut over; the logits are this device's. Tokens are the same.
    """
    if axis_name is not None:
        state = reference.gather(rows.slot_ids, rows.num_tokens, _slots(carry))
        tokens = sample_sharded(logits, *state, axis_name=axis_name, implementation=implementation)
        return _advance(carry, rows, tokens), StepOutput(tokens, None)
    tokens, slots = sample_slots(
        logits, rows.slot_ids, rows.samples, rows.num_tokens, _slots(carry), implementation=implementation
    )
    return _with_slots(carry, slots), StepOutput(tokens, None)


def sample_cut(
    carry: Carry,
    logits: jax.Array,
    rows: Rows,
    *,
    vocab_size: int | None = None,
    implementation: str = "reference",
    axis_name: str | None = None,
) -> tuple[Carry, StepOutput]:
    """As `sample_plain`, with min-p, top-k and top-p. On a mesh every device samples some of the rows.

    A kernel passes over what a row does not use. The reference makes its passes for all rows, so it makes none where no
    row uses a cut.
    """
    logits = columns_to_rows(logits, axis_name, vocab_size or logits.shape[1])
    own = jax.tree.map(lambda column: own_rows(column, axis_name), rows)
    state = reference.gather(own.slot_ids, own.num_tokens, _slots(carry))
    cuts, vocab = _cuts(carry, own), logits.shape[1]

    def choose(**cuts: jax.Array) -> jax.Array:
        return sample(logits, *state, **cuts, implementation=implementation)

    if implementation == "reference":
        is_cut = (cuts["min_p"] > 0) | (cuts["top_k"] < vocab) | (cuts["top_p"] < 1)
        tokens = jax.lax.cond(jnp.any(is_cut), lambda: choose(**cuts), choose)
    else:
        tokens = choose(**cuts)
    tokens = gather_rows(tokens, axis_name, rows.slot_ids.shape[0])
    return _advance(carry, rows, tokens), StepOutput(tokens, None)


def sample_full(
    carry: Carry,
    features: Features,
    logits: jax.Array,
    rows: Rows,
    *,
    vocab_size: int | None = None,
    implementation: str = "reference",
    axis_name: str | None = None,
) -> tuple[Carry, Features, StepOutput]:
    """As `sample_plain`, with all features, the token history, and log-probabilities.

    On a mesh every device samples some of the rows.
    """
    num_rows = rows.slot_ids.shape[0]
    logits = columns_to_rows(logits, axis_name, vocab_size or logits.shape[1])
    own = jax.tree.map(lambda column: own_rows(column, axis_name), rows)
    temperature, seeds, positions = reference.gather(own.slot_ids, own.num_tokens, _slots(carry))
    used = jax.tree.map(lambda table: table.at[own.slot_ids].get(mode="clip"), features)
    is_used = carry.uses_features.at[own.slot_ids].get(mode="fill", fill_value=False)
    adjusted = jnp.where(is_used[:, None], adjust(logits, used, positions), logits)
    tokens = sample(adjusted, temperature, seeds, positions, **_cuts(carry, own), implementation=implementation)
    output = StepOutput(tokens, raw_logprobs(logits, tokens))
    output, positions = jax.tree.map(lambda part: gather_rows(part, axis_name, num_rows), (output, positions))
    carry = _advance(carry, rows, output.tokens)
    target = jnp.where(rows.samples, rows.slot_ids, features.history.shape[0])
    history = features.history.at[target, positions].set(jnp.maximum(output.tokens, 0), mode="drop")
    return carry, dataclasses.replace(features, history=history), output


def adjust(logits: jax.Array, features: Features, positions: jax.Array) -> jax.Array:
    """What comes before the temperature.

    Args:
      logits: float32 [S, V].
      features: each row's, leading axis S.
      positions: int32 [S]: where the token being chosen will stand.
    """
    logits = transforms.only_allowed(logits, features.allowed)
    logits = transforms.ban_words(logits, features.bad_words, features.history, positions, features.prompt_lens)
    logits = transforms.not_yet_ending(logits, features.end_ids, positions < features.min_lens)
    logits = transforms.add_bias(logits, features.bias_ids, features.bias_values)
    return transforms.penalise(logits, features, positions)


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


def _cuts(carry: Carry, rows: Rows) -> dict[str, jax.Array]:
    """Each row's min_p, top_k and top_p; off in padding rows."""
    off = {"min_p": 0.0, "top_k": jnp.iinfo(jnp.int32).max, "top_p": 1.0}
    return {
        name: getattr(carry, name).at[rows.slot_ids].get(mode="fill", fill_value=value) for name, value in off.items()
    }


def _slots(carry: Carry) -> Slots:
    return Slots(carry.last_tokens, carry.num_computed, carry.temperature, carry.seeds)


def _with_slots(carry: Carry, slots: Slots) -> Carry:
    return dataclasses.replace(carry, last_tokens=slots.last_tokens, num_computed=slots.num_computed)


def _advance(carry: Carry, rows: Rows, tokens: jax.Array) -> Carry:
    return _with_slots(carry, reference.advance(tokens, rows.slot_ids, rows.samples, rows.num_tokens, _slots(carry)))
