"""`sample` where each device has some of the logits: its own best, then the best of all devices.

Inside a `shard_map` over `axis_name`. Device d has ids d * n .. (d + 1) * n, n a multiple of `TILE`. Logits are not
gathered; what travels is the largest logit of a row, and then a score and an id of every device.

The noise of a draw depends on the id, and a tile's score on its own logits and the row's maximum only, so a token is
the one that a single device with all logits takes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxinfer.kernels.sampling import reference
from jaxinfer.kernels.sampling.reference import NEVER, TILE
from jaxinfer.sharding.collectives import all_gather, all_max, axis_index


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    *,
    axis_name: str,
    implementation: str = "reference",
) -> jax.Array:
    """Chooses a token a row, greedy or drawn, without cuts: see `api.sample`.

    Args:
      logits: float32 [S, n]: this device's; -inf for ids that do not exist.
      temperature, seeds, positions: of all rows, as for `api.sample`; equal on all devices.
      axis_name: of the mesh axis.
      implementation: "mosaic_gpu" reads the logits with Hopper's kernel.

    Returns:
      int32 [S], equal on all devices; -1 where no token can be chosen.

    Raises:
      ValueError: logits that are no whole tiles.
    """
    if logits.shape[1] % TILE:
        raise ValueError(f"{logits.shape[1]} logits a device are no whole tiles of {TILE}")
    first_tile = axis_index(axis_name) * (logits.shape[1] // TILE)
    rows = (temperature, seeds, positions)
    if implementation == "mosaic_gpu":
        from jaxinfer.kernels.sampling import mosaic_gpu

        best, scores, ids = mosaic_gpu.candidates(logits, *rows, first_tile, axis_name)
    else:
        best, scores, ids = candidates(logits, *rows, first_tile, axis_name)
    return jnp.where(jnp.isfinite(best), combine(scores, ids, axis_name), -1)


def candidates(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    first_tile: jax.Array,
    axis_name: str,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(the row's largest logit, inf if one is NaN; this device's best score; its id)."""
    is_nan = jnp.any(jnp.isnan(logits), axis=1)  # a maximum alone may pass over a NaN on CPU
    best = all_max(jnp.where(is_nan, jnp.inf, jnp.max(logits, axis=1)), axis_name)
    scaled = reference.scale(logits, best, temperature)
    drawn_scores, drawn_ids = reference.draw_among(scaled, seeds, positions, first_tile)
    greedy_ids = first_tile * TILE + reference.argmax_lowest(scaled)
    is_drawn = temperature > 0
    scores = jnp.where(is_drawn, drawn_scores, jnp.max(scaled, axis=1))
    return best, scores, jnp.where(is_drawn, drawn_ids, greedy_ids)


def combine(scores: jax.Array, ids: jax.Array, axis_name: str) -> jax.Array:
    """The id of the highest score, [S]; of equal ones the first device's, which has the lowest ids."""
    words = jnp.stack([jax.lax.bitcast_convert_type(scores, jnp.int32), ids])
    every = all_gather(words, axis_name)  # [devices, 2, S]
    scores = jax.lax.bitcast_convert_type(every[:, 0], jnp.float32)
    winner = jnp.argmax(jnp.where(jnp.isnan(scores), NEVER, scores), axis=0)
    return jnp.take_along_axis(every[:, 1], winner[None], axis=0)[0]
