"""Rotary position embedding (arXiv 2104.09864) in the rotate-half layout, with the published scalings.

llama3 scaling is that of Llama 3.1; YaRN is arXiv 2309.00071. Tables are float32, computed in the order of
operations that transformers uses, so that angles agree at positions of many thousands.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.config import RopeConfig

__all__ = ["attention_factor", "inverse_frequencies", "rotary_angles"]


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """float32 [head_dim / 2]: radians a token.

    Raises:
      ValueError: a kind that is not implemented.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    base = np.float32(1.0) / np.power(np.float32(rope.theta), exponents, dtype=np.float32)
    if rope.divisors:
        return base / np.asarray(rope.divisors, np.float32)
    if rope.kind == "default":
        return base
    if rope.kind == "linear":
        return base / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3(base, rope)
    if rope.kind == "yarn":
        return _yarn(base, rope, head_dim)
    raise ValueError(f"RoPE type {rope.kind!r} is not supported")


def _llama3(base: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Low frequencies are divided by the factor, high ones kept, those between blended."""
    wavelength = 2 * math.pi / base
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = (rope.original_max_position / wavelength - low) / (high - low)
    blended = (1 - smooth) * base / rope.factor + smooth * base
    out = np.where(wavelength > rope.original_max_position / low, base / rope.factor, base)
    is_between = (wavelength <= rope.original_max_position / low) & (wavelength >= rope.original_max_position / high)
    return np.where(is_between, blended, out).astype(np.float32)


def _yarn(base: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Components that turn often within the original length are kept, those that turn rarely are divided."""

    def component(turns: float) -> float:
        """The (fractional) component that turns so often within the original length."""
        length = rope.original_max_position / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low = max(math.floor(component(rope.beta_fast)), 0)
    high = min(math.ceil(component(rope.beta_slow)), head_dim - 1)
    span = max(high - low, 0.001)
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(span), 0, 1)
    kept = np.float32(1.0) - ramp
    return (base / np.float32(rope.factor) * (1 - kept) + base * kept).astype(np.float32)


def attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1 except for YaRN."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def rotary_angles(positions: jax.Array, frequencies: jax.Array, factor: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """int32 [T] -> cos and sin, float32 [T, head_dim / 2], times `factor`."""
    angles = positions.astype(jnp.float32)[:, None] * frequencies[None, :]
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor
