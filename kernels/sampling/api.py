"""`sample`: validates, then dispatches."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.kernels.sampling import reference
from jaxinfer.kernels.sampling.reference import Slots

IMPLEMENTATIONS = ("mosaic_gpu", "reference")


def choose(platform: str, *, compute_capability: str, vocab: int = 0) -> str:
    """The fastest implementation: Hopper's kernels where they can, else the reference.

    Args:
      platform: "cpu", "gpu" or "tpu".
      compute_capability: of the GPU, such as "9.0".
      vocab: V, or 0 where it is surely not beyond what the kernels take.
    """
    if platform == "gpu" and compute_capability == "9.0":
        from jaxinfer.kernels.sampling import mosaic_gpu

        try:
            mosaic_gpu.check_supported(vocab)
        except NotImplementedError:
            return "reference"
        return "mosaic_gpu"
    return "reference"


@partial(jax.jit, static_argnames=("implementation",))
def sample(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    *,
    min_p: jax.Array | None = None,
    top_k: jax.Array | None = None,
    top_p: jax.Array | None = None,
    implementation: str = "reference",
) -> jax.Array:
    """Chooses a token a row: temperature -> min_p -> top_k -> top_p -> greedy or drawn.

    Every cut keeps a prefix of the ids in the order (scaled logit descending, id ascending), so exactly k remain after
    top_k, and the best id always remains. The draw is Gumbel-max in two levels (`reference.draw`); its noise is a hash
    of (seed, position, index), so that a row's token depends on no other row and not on V's padding with -inf.

    Args:
      logits: float32 [S, V]; -inf is never chosen.
      temperature: float32 [S]: 0 is greedy, the lowest id among equal maxima.
      seeds: uint32 [S, 2]: low and high word.
      positions: int32 [S]: where the chosen token will stand.
      min_p: float32 [S]: keeps ids at least this times as likely as the best; 0 is off. None is off for all rows.
      top_k: int32 [S]: keeps the k best; V or more is off. None is off for all rows.
      top_p: float32 [S]: keeps an id iff the mass strictly before it is below this share of what the cuts before
        left; 1 is off. None is off for all rows.
      implementation: one of `IMPLEMENTATIONS`.

    Returns:
      int32 [S]; -1 where no token can be chosen: the row's maximum is -inf, inf or NaN.

    Raises:
      ValueError: shapes or dtypes that do not fit.
      NotImplementedError: the implementation cannot do this case.
    """
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits must be float32 [S, V], got {logits.dtype} {logits.shape}")
    rows = logits.shape[0]
    expected = {
        "temperature": (temperature, (rows,), jnp.float32),
        "seeds": (seeds, (rows, 2), jnp.uint32),
        "positions": (positions, (rows,), jnp.int32),
        "min_p": (min_p, (rows,), jnp.float32),
        "top_k": (top_k, (rows,), jnp.int32),
        "top_p": (top_p, (rows,), jnp.float32),
    }
    for name, (value, shape, dtype) in expected.items():
        if value is not None and (value.shape != shape or value.dtype != dtype):
            raise ValueError(f"{name} must be {jnp.dtype(dtype)} {shape}, got {value.dtype} {value.shape}")
    arguments = (logits, temperature, seeds, positions)
    cuts: dict[str, Any] = {"min_p": min_p, "top_k": top_k, "top_p": top_p}
    if implementation == "mosaic_gpu":
        from jaxinfer.kernels.sampling import mosaic_gpu

        return mosaic_gpu.sample(*arguments, **cuts)
    if implementation == "reference":
        return reference.sample(*arguments, **cuts)
    raise NotImplementedError(f"sampling has no implementation {implementation!r}")


@partial(jax.jit, static_argnames=("implementation",))
def sample_slots(
    logits: jax.Array,
    slot_ids: jax.Array,
    samples: jax.Array,
    num_tokens: jax.Array,
    slots: Slots,
    *,
    implementation: str = "reference",
) -> tuple[jax.Array, Slots]:
    """`sample` without cuts, together with the state that it reads and advances.

    Args:
      logits: float32 [S, V].
      slot_ids: int32 [S]: each row's slot, all different; B for padding rows, which read and write nothing.
      samples: bool [S]: whether the row's token becomes its slot's last one.
      num_tokens: int32 [S]: what to add to the slot's num_computed, which gives the chosen token's position.
      slots: the state by slot; donate it.
      implementation: one of `IMPLEMENTATIONS`.

    Returns:
      (tokens int32 [S], -1 where none can be chosen; the slots, where such a row leaves token 0).

    Raises:
      ValueError: shapes or dtypes that do not fit.
      NotImplementedError: the implementation cannot do this case.
    """
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits must be float32 [S, V], got {logits.dtype} {logits.shape}")
    if not slot_ids.shape == samples.shape == num_tokens.shape == logits.shape[:1]:
        raise ValueError(f"{logits.shape[0]} rows, but {slot_ids.shape}, {samples.shape}, {num_tokens.shape}")
    arguments = (logits, slot_ids, samples, num_tokens, slots)
    if implementation == "mosaic_gpu":
        from jaxinfer.kernels.sampling import mosaic_gpu

        return mosaic_gpu.sample_slots(*arguments)
    if implementation == "reference":
        return reference.sample_slots(*arguments)
    raise NotImplementedError(f"sampling has no implementation {implementation!r}")
