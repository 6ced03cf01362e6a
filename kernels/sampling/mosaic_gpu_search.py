"""Order statistics without a sort: where a falling function of a threshold crosses a target.

The function is the number, or the mass, of the elements that are at least the threshold. A pass evaluates it at a few
pivots and so narrows the bracket; it also says the smallest and largest element inside, so that the search ends at an
element, exactly:

    elements     . .    . .. ... .. . ..   .     .
    bracket           [lo                 hi)            function(lo) >= target > function(hi)
    pivots                |    |  m  |    |              even steps, and m, half-way in the order of floats: with it
                                                         no bracket takes more than 32 passes
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.kernels.sampling.mosaic_gpu_common import INF

NUM_PIVOTS = 4
MAX_PASSES = 80
LOWEST = np.float32(-3.4e38)


@dataclasses.dataclass(frozen=True)
class Pass:
    """What a pass over [lo, hi) says: the function at each pivot, and the smallest and largest element inside."""

    values: list[jax.Array]
    smallest: jax.Array
    largest: jax.Array


def search(
    evaluate: Callable[[list[jax.Array], jax.Array, jax.Array, Any], tuple[Pass, Any]],
    target: jax.Array,
    lo: jax.Array,
    top: jax.Array,
    state: Any,
    *,
    max_passes: int = MAX_PASSES,
) -> tuple[jax.Array, jax.Array, Any]:
    """The largest element at which the function still reaches the target; the smallest from `lo` on if none does.

    Args:
      evaluate: (pivots, lo, hi, state) -> (what a pass says, state).
      target: of the function's type.
      lo: a finite value at which the function reaches the target.
      top: the largest element.
      state: carried from pass to pass.
      max_passes: after so many passes what has been found is returned.

    Returns:
      (the element, or a bound below it; the function there, or below 0 where it is not known to reach the target;
      state)
    """

    def is_open(carry: tuple) -> jax.Array:
        return carry[0] < max_passes

    def narrow(carry: tuple) -> tuple:
        number, lo, hi, top, at_lo, state = carry
        pivots = [lo * np.float32(1 - i / NUM_PIVOTS) + top * np.float32(i / NUM_PIVOTS) for i in range(1, NUM_PIVOTS)]
        pivots += [top, _middle(lo, jnp.minimum(hi, top))]
        found, state = evaluate(pivots, lo, hi, state)
        is_single = ~(found.smallest < found.largest)
        exact = jnp.where(found.smallest < INF, found.smallest, lo)
        new_lo, new_hi, new_at_lo = jnp.maximum(lo, exact), hi, at_lo
        for pivot, value in zip(pivots, found.values, strict=True):
            reaches = value >= target
            new_at_lo = jnp.where(reaches & (pivot >= new_lo), value, new_at_lo)
            new_lo = jnp.where(reaches, jnp.maximum(new_lo, pivot), new_lo)
            new_hi = jnp.where(reaches, new_hi, jnp.minimum(new_hi, pivot))
        ends = is_single | (at_lo == target)
        new_lo = jnp.where(ends, exact, new_lo)
        number = jnp.where(ends, max_passes, number + 1)
        return number, new_lo, new_hi, jnp.minimum(found.largest, new_hi), new_at_lo, state

    carry = (jnp.int32(0), lo, INF + 0 * lo, top, target * 0 - 1, state)
    carry = lax.while_loop(is_open, narrow, carry)
    return carry[1], carry[4], carry[5]


def _middle(lo: jax.Array, hi: jax.Array) -> jax.Array:
    """The float half-way between two in the order of floats, above the lower."""
    first, last = _ordered(lo), _ordered(hi)
    middle = (first >> 1) + (last >> 1) + (first & last & 1)
    middle = jnp.maximum(middle, jnp.minimum(first + 1, last))
    bits = jnp.where(middle < 0, middle ^ np.int32(0x7FFFFFFF), middle)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _ordered(value: jax.Array) -> jax.Array:
    """float32 -> int32 with the same order."""
    bits = lax.bitcast_convert_type(value + 0.0, jnp.int32)
    return jnp.where(bits < 0, bits ^ np.int32(0x7FFFFFFF), bits)
