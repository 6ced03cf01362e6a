"""The sampling pipeline again, in NumPy, one row at a time and with plain sorting."""

from __future__ import annotations

import numpy as np

from jaxinfer.core import SamplingParams


def process(
    logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int], end_ids=(), bad_words=()
) -> np.ndarray:
    """float64 [V] -> processed logits; -inf for what cannot be chosen."""
    x = logits.astype(np.float64).copy()
    if params.allowed_token_ids is not None:
        mask = np.full(len(x), True)
        mask[list(params.allowed_token_ids)] = False
        x[mask] = -np.inf
    for word in bad_words:
        *head, last = word
        if list(output[len(output) - len(head) :]) == head and len(output) >= len(head):
            x[last] = -np.inf
    if len(output) < params.min_tokens:
        x[list(end_ids)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        x[token] += bias
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        count = output.count(token)
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    if params.temperature > 0:
        x = x / max(params.temperature, 1e-6)
    x = x - x.max()
    if params.min_p > 0:
        x[np.exp(x) < params.min_p] = -np.inf
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    if params.top_k > 0:
        x[order[params.top_k :]] = -np.inf
    if params.top_p < 1:
        weights = np.exp(x[order])
        before = np.concatenate([[0.0], np.cumsum(weights)[:-1]]) / weights.sum()
        x[np.array(order)[before >= params.top_p]] = -np.inf
    return x


def probabilities(processed: np.ndarray) -> np.ndarray:
    weights = np.exp(processed - processed.max())
    return weights / weights.sum()


def chi_square_p(counts: np.ndarray, expected: np.ndarray) -> float:
    """p-value of a chi-square test; cells that expect fewer than 5 are merged."""
    from math import erfc, sqrt

    order = np.argsort(expected)
    counts, expected = counts[order].astype(float), expected[order]
    merged: list[tuple[float, float]] = []
    c = e = 0.0
    for count, want in zip(counts, expected, strict=True):
        c, e = c + count, e + want
        if e >= 5:
            merged.append((c, e))
            c = e = 0.0
    if merged and e > 0:
        merged[-1] = (merged[-1][0] + c, merged[-1][1] + e)
    observed, wanted = np.array(merged).T
    degrees = max(len(merged) - 1, 1)
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    # Wilson and Hilferty's cube-root approximation of the chi-square distribution
    z = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / sqrt(2 / (9 * degrees))
    return 0.5 * erfc(z / sqrt(2))
