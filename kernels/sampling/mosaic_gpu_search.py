"""Order statistics without a sort: where a falling function of a threshold crosses a target.

The function is the number, or the mass, of the elements that are at least the threshold. A pass evaluates it at a few
pivots and so narrows the bracket; it also says the smallest and largest element inside, so that the search ends at an
element, exactly:

    elements     . .    . .. ... .. . ..   .     .
    bracket           [lo                 hi)            function(lo) >= target > function(hi)
    pivots                |    |  m  |                   at given fractions, and m, half-way in the order of floats:
                                                         with it no bracket takes more than 32 passes
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxinfer.kernels.sampling.mosaic_gpu_common import INF

MAX_PASSES = 80
LOWEST = np.float32(-3.4e38)


@dataclasses.dataclass(frozen=True)
class Pass:
    """What a pass over [lo, hi) says: the function at each pivot, and the smallest and largest element inside."""

    values: Sequence[jax.Array]
    smallest: jax.Array
    largest: jax.Array


def crossing(
    evaluate: Callable[[Sequence[jax.Array], jax.Array, jax.Array, Any], tuple[Pass, Any]],
    target: jax.Array,
    lo: jax.Array,
    top: jax.Array,
    state: Any,
    *,
    fractions: Sequence[float],
) -> tuple[jax.Array, Any]:
    """The largest element at which the function still reaches the target; the smallest from `lo` on if none does.

    Args:
      evaluate: (pivots, lo, hi, state) -> (what a pass says, state).
      target: of the function's type.
      lo: a finite value at which the function reaches the target.
      top: the largest element.
      state: carried from pass to pass.
      fractions: where between lo and the largest element in the bracket the pivots are.

    Returns:
      (the element, state).
    """

    def is_open(carry: tuple) -> jax.Array:
        return carry[0] < MAX_PASSES

    def narrow(carry: tuple) -> tuple:
        number, lo, hi, top, at_lo, state = carry
        pivots = [lo * np.float32(1 - f) + top * np.float32(f) for f in fractions]
        pivots.append(_middle(lo, jnp.minimum(hi, top)))
        found, state = evaluate(pivots, lo, hi, state)
        is_single = ~(found.smallest < found.largest)
        exact = jnp.where(found.smallest < INF, found.smallest, lo)
        ends = is_single | (at_lo == target)
        new_lo, new_hi = jnp.maximum(lo, exact), hi
        for pivot, value in zip(pivots, found.values, strict=True):
            reaches = value >= target
            at_lo = jnp.where(reaches & (pivot >= new_lo), value, at_lo)
            new_lo = jnp.where(reaches, jnp.maximum(new_lo, pivot), new_lo)
            new_hi = jnp.where(reaches, new_hi, jnp.minimum(new_hi, pivot))
        number = jnp.where(ends, MAX_PASSES, number + 1)
        new_lo = jnp.where(ends, exact, new_lo)
        return number, new_lo, new_hi, jnp.minimum(found.largest, new_hi), at_lo, state

    carry = (jnp.int32(0), lo, INF + 0 * lo, top, target * 0 - 1, state)
    carry = lax.while_loop(is_open, narrow, carry)
    return carry[1], carry[5]


def lower_bound(
    function: Callable[[jax.Array], jax.Array],
    target: jax.Array,
    lo: jax.Array,
    hi: jax.Array,
    *,
    enough: jax.Array,
    max_passes: int,
) -> jax.Array:
    """A bound at which the falling function reaches the target, by halving [lo, hi]; LOWEST if none was found.

    Args:
      enough: a value of the function that is near enough to the target.
    """

    def is_open(carry: tuple) -> jax.Array:
        number, _, _, at_lo = carry
        return (number < max_passes) & ((at_lo < target) | (at_lo > enough))

    def halve(carry: tuple) -> tuple:
        number, lo, hi, at_lo = carry
        middle = lo * np.float32(0.5) + hi * np.float32(0.5)
        value = function(middle)
        reaches = value >= target
        return (
            number + 1,
            jnp.where(reaches, middle, lo),
            jnp.where(reaches, hi, middle),
            jnp.where(reaches, value, at_lo),
        )

    _, lo, _, at_lo = lax.while_loop(is_open, halve, (jnp.int32(0), lo, hi, target * 0 - 1))
    return jnp.where(at_lo >= target, lo, LOWEST)


def first_place(sum_before: Callable[[jax.Array], jax.Array], n: jax.Array, num_places: int) -> jax.Array:
    """The last place in [0, num_places) before which a rising sum is still less than n; n is at least 1."""
    bits = max(num_places - 1, 1).bit_length()

    def try_bit(i: jax.Array, place: jax.Array) -> jax.Array:
        candidate = place + (np.int32(1 << (bits - 1)) >> i)
        return jnp.where((candidate < num_places) & (sum_before(candidate) < n), candidate, place)

    return lax.fori_loop(0, bits, try_bit, jnp.int32(0))


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
