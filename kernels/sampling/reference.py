"""The specification of `sampling`: temperature, exact cuts and the two-level draw, each a few lines of jnp.

Logits are float32 [S, V]; `-inf` means "never".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxinfer.kernels.sampling.noise import Stream, gumbel, row_keys

NEVER = -jnp.inf
TILE = 128
"""Ids a tile of the two-level draw. Fixed, and a divisor of every shard of a vocabulary."""
MIN_TEMPERATURE = 1e-6
"""Smaller temperatures act like this one: 1 / T stays finite, and a gap of 1e-4 already decides."""


class Slots(NamedTuple):
    """What the sampler knows of the requests, by slot; B of them."""

    last_tokens: jax.Array  # int32 [B]: the token chosen last
    num_computed: jax.Array  # int32 [B]: tokens before the one being chosen, without this step's
    temperature: jax.Array  # float32 [B]
    seeds: jax.Array  # uint32 [B, 2]


def sample_slots(
    logits: jax.Array, slot_ids: jax.Array, samples: jax.Array, num_tokens: jax.Array, slots: Slots
) -> tuple[jax.Array, Slots]:
    """See `api.sample_slots`."""
    temperature, seeds, positions = gather(slot_ids, num_tokens, slots)
    tokens = sample(logits, temperature, seeds, positions)
    return tokens, advance(tokens, slot_ids, samples, num_tokens, slots)


def gather(slot_ids: jax.Array, num_tokens: jax.Array, slots: Slots) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Each row's temperature and seed, and where its next token will stand; 0 for padding rows."""
    used = jax.tree.map(lambda table: table.at[slot_ids].get(mode="fill", fill_value=0), slots)
    return used.temperature, used.seeds, used.num_computed + num_tokens


def advance(tokens: jax.Array, slot_ids: jax.Array, samples: jax.Array, num_tokens: jax.Array, slots: Slots) -> Slots:
    """Writes tokens and counts back by slot; rows without a token, -1, leave token 0."""
    target = jnp.where(samples, slot_ids, slots.last_tokens.shape[0])
    return slots._replace(
        last_tokens=slots.last_tokens.at[target].set(jnp.maximum(tokens, 0), mode="drop"),
        num_computed=slots.num_computed.at[slot_ids].add(num_tokens, mode="drop"),
    )


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    *,
    min_p: jax.Array | None = None,
    top_k: jax.Array | None = None,
    top_p: jax.Array | None = None,
) -> jax.Array:
    """See `api.sample`."""
    scaled = cut(logits, temperature, min_p=min_p, top_k=top_k, top_p=top_p)
    # A maximum alone may pass over a NaN on CPU.
    is_bad = ~jnp.isfinite(jnp.max(logits, axis=1)) | jnp.any(jnp.isnan(logits), axis=1)
    return jnp.where(is_bad, -1, choose(scaled, temperature, seeds, positions))


def cut(
    logits: jax.Array,
    temperature: jax.Array,
    *,
    min_p: jax.Array | None = None,
    top_k: jax.Array | None = None,
    top_p: jax.Array | None = None,
) -> jax.Array:
    """Scaled logits whose best is 0, -inf where they are cut off; NaN in rows that have none."""
    scaled = apply_temperature(logits, temperature)
    if min_p is not None:
        scaled = keep_min_p(scaled, min_p)
    if top_k is not None:
        scaled = keep_top_k(scaled, jnp.clip(top_k, 1, logits.shape[1]))
    return scaled if top_p is None else keep_top_p(scaled, top_p)


def apply_temperature(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """(logits - their maximum) / temperature: the best is 0 at any temperature. Greedy rows are only shifted."""
    return scale(logits, jnp.max(logits, axis=1), temperature)


def scale(logits: jax.Array, best: jax.Array, temperature: jax.Array) -> jax.Array:
    """(logits - best) / temperature, float32 [S, n], with the largest logit of each row, [S]."""
    divisor = jnp.where(temperature > 0, jnp.maximum(temperature, MIN_TEMPERATURE), 1.0)
    return (logits - best[:, None]) / divisor[:, None]


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


def argmax_lowest(logits: jax.Array) -> jax.Array:
    """int32 [S]: the lowest id among equal maxima."""
    return jnp.argmax(logits, axis=1).astype(jnp.int32)


def draw(logits: jax.Array, seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """One id a row with probability softmax(logits): Gumbel-max in two levels.

    First a tile of `TILE` ids with probability proportional to its sum, then an id inside it: exact, a hundredth of
    the draws, and independent of padding and of how tiles are spread over devices.

    Args:
      logits: float32 [S, V] with maximum 0.
      seeds: uint32 [S, 2].
      positions: int32 [S]: the chosen token's.
    """
    return draw_among(logits, seeds, positions, jnp.int32(0))[1]


def draw_among(
    logits: jax.Array, seeds: jax.Array, positions: jax.Array, first_tile: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """`draw` among the ids of some tiles: (score of the chosen tile float32 [S], its chosen id).

    Over all tiles, the one with the highest score holds the drawn id; of equal ones the first.

    Args:
      logits: float32 [S, n], of the ids from tile `first_tile` on. The maximum over all ids is 0.
    """
    num_rows, vocab = logits.shape
    num_tiles = -(-vocab // TILE)
    padded = jnp.pad(logits, ((0, 0), (0, num_tiles * TILE - vocab)), constant_values=-jnp.inf)
    tiles = padded.reshape(num_rows, num_tiles, TILE)
    maxima = jnp.max(tiles, axis=2)
    safe = jnp.where(jnp.isfinite(maxima), maxima, 0.0)
    masses = jnp.log(jnp.sum(jnp.exp(tiles - safe[:, :, None]), axis=2)) + safe  # -inf for an empty tile
    numbers = first_tile + jnp.arange(num_tiles, dtype=jnp.int32)[None, :]
    scores = masses + gumbel(row_keys(seeds, positions, Stream.TILE), numbers)
    tile = argmax_lowest(scores)
    inside = jnp.take_along_axis(tiles, tile[:, None, None], axis=1)[:, 0]
    return jnp.max(scores, axis=1), draw_inside(inside, seeds, positions, first_tile + tile)


def draw_inside(logits: jax.Array, seeds: jax.Array, positions: jax.Array, tile: jax.Array) -> jax.Array:
    """The id drawn inside a tile, int32 [S], from the tile's logits float32 [S, TILE]."""
    ids = tile[:, None] * TILE + jnp.arange(TILE, dtype=jnp.int32)[None, :]
    noise = gumbel(row_keys(seeds, positions, Stream.SAMPLE), ids)
    return tile * TILE + argmax_lowest(logits + noise)


def choose(logits: jax.Array, temperature: jax.Array, seeds: jax.Array, positions: jax.Array) -> jax.Array:
    """Greedy where temperature is 0, drawn elsewhere; `logits` are processed and have maximum 0."""
    return jnp.where(temperature > 0, draw(logits, seeds, positions), argmax_lowest(logits))
