"""The Hopper sampling kernels against the reference on a GPU."""

from __future__ import annotations

from functools import partial

import jax
import numpy as np
import pytest

from jaxinfer.kernels.sampling import arg_specs, mosaic_gpu, reference
from jaxinfer.kernels.sampling.arg_specs import Inputs, Spec
from jaxinfer.kernels.sampling.noise import Stream, gumbel, row_keys

pytestmark = pytest.mark.device
V = 151936
CASES = {
    "greedy and drawn": Spec(64, V, (0.0, 1.0, 0.3)),
    "one row": Spec(1, V, (1.0,)),
    "odd vocabulary": Spec(33, 50257, (0.0, 1.0)),
    "top-k and top-p": Spec(64, V, (0.7,), top_k=(50, 1, 20), top_p=(0.9, 0.5)),
    "top-k and top-p, ties": Spec(64, V, (0.7,), top_k=(50, 1000, 20), top_p=(0.9, 0.5), levels=8),
    "top-p, peaked": Spec(64, V, (0.7,), top_p=(0.9, 0.2, 0.999), peak=12.0),
    "top-p, flat": Spec(16, V, (1.0,), top_p=(0.9, 0.3)),
    "top-k of many": Spec(16, V, (1.0,), top_k=(1000, 100_000, V - 1)),
    "min-p": Spec(64, V, (1.0, 0.0), min_p=(0.1, 0.0), top_k=(V, 30), peak=12.0),
}


def near_ties(inputs: Inputs, rows: np.ndarray, tokens: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """How far apart the reference's scores of two choices are: of their tiles, or of the ids inside one tile."""
    scaled = reference.cut(inputs.logits[rows], inputs.temperature[rows], **_rows(inputs, rows))
    seeds, positions = inputs.seeds[rows], inputs.positions[rows]
    gaps = np.zeros(len(rows))
    for i, (got, want) in enumerate(zip(tokens, expected, strict=True)):
        row = np.asarray(scaled[i], np.float64)
        if got // 128 == want // 128:
            stream, indices, scores = Stream.SAMPLE, [got, want], row[[got, want]]
        else:
            tiles = [int(got) // 128, int(want) // 128]
            with np.errstate(divide="ignore"):
                scores = np.log([np.exp(row[t * 128 : (t + 1) * 128]).sum() for t in tiles])
            stream, indices = Stream.TILE, tiles
        keys = row_keys(seeds[i : i + 1], positions[i : i + 1], stream)
        scores = scores + np.asarray(gumbel(keys, np.asarray([indices], np.int32)))[0]
        gaps[i] = abs(scores[0] - scores[1])
    return gaps


def _rows(inputs: Inputs, rows: np.ndarray) -> dict:
    return {name: None if value is None else value[rows] for name, value in inputs.cuts.items()}


@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name: str) -> None:
    """The same tokens, save where the reference's own scores of both are within rounding."""
    assert jax.default_backend() == "gpu", "these need a Hopper GPU"
    for seed in range(3):
        inputs = arg_specs.make_inputs(CASES[name], seed=seed)
        expected = np.asarray(jax.jit(partial(reference.sample))(*inputs[:4], **inputs.cuts))
        run = jax.jit(mosaic_gpu.sample)
        tokens = np.asarray(run(*inputs[:4], **inputs.cuts))
        np.testing.assert_array_equal(tokens, np.asarray(run(*inputs[:4], **inputs.cuts)))  # races would show
        rows = np.flatnonzero(tokens != expected)
        assert (near_ties(inputs, rows, tokens[rows], expected[rows]) < 1e-4).all()
        assert (np.asarray(inputs.temperature)[rows] > 0).all()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    inputs = arg_specs.make_inputs(Spec(40, V, (1.0, 0.5), top_k=(50, V), top_p=(0.9, 1.0)), seed=7)
    together = np.asarray(mosaic_gpu.sample(*inputs[:4], **inputs.cuts))
    order = np.random.default_rng(0).permutation(40)
    for rows in (order, order[:7], order[:1]):
        part = mosaic_gpu.sample(*(x[rows] for x in inputs[:4]), **_rows(inputs, rows))
        np.testing.assert_array_equal(np.asarray(part), together[rows])
