"""The Hopper sampling kernels against the reference on a GPU."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.sampling import arg_specs, mosaic_gpu, reference
from jaxinfer.kernels.sampling.arg_specs import Inputs, Spec
from jaxinfer.kernels.sampling.noise import Stream, gumbel, row_keys

pytestmark = pytest.mark.device
V = 151936
OFF = {"min_p": (0.0,), "top_k": (V,), "top_p": (1.0,)}
CASES = {  # few shapes, so that few programs are compiled
    "greedy and drawn": Spec(64, V, (0.0, 1.0, 0.3)),
    "one row": Spec(1, V, (1.0,)),
    "odd vocabulary": Spec(33, 50257, (0.0, 1.0)),
    "top-k and top-p": Spec(64, V, (0.7,), **OFF | {"top_k": (50, 1, 20), "top_p": (0.9, 0.5)}),
    "ties": Spec(64, V, (0.7,), **OFF | {"top_k": (50, 1000, 20), "top_p": (0.9, 0.5)}, levels=8),
    "top-p, peaked": Spec(64, V, (0.7,), **OFF | {"top_p": (0.9, 0.2, 0.999)}, peak=12.0),
    "top-p, flat": Spec(64, V, (1.0,), **OFF | {"top_p": (0.9, 0.3)}),
    "top-k of many": Spec(64, V, (1.0,), **OFF | {"top_k": (1000, 100_000, V - 1)}),
    "min-p": Spec(64, V, (1.0, 0.0), **OFF | {"min_p": (0.1, 0.0), "top_k": (V, 30)}, peak=12.0),
    "256 rows": Spec(256, V, (0.7,), **OFF | {"top_k": (50, 1000), "top_p": (0.9, 1.0, 0.5)}),
}
run, expect = jax.jit(mosaic_gpu.sample), jax.jit(reference.sample)


def near_ties(inputs: Inputs, rows: np.ndarray, tokens: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """How far apart the reference's scores of two choices are: of their tiles, or of the ids inside one tile.

    Infinite where it cuts one of them off.
    """
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
        gaps[i] = abs(scores[0] - scores[1]) if np.isfinite(scores).all() else np.inf
    return gaps


def _rows(inputs: Inputs, rows: np.ndarray) -> dict:
    return {name: None if value is None else value[rows] for name, value in inputs.cuts.items()}


@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name: str) -> None:
    """The same tokens, save where the reference's own scores of both are within rounding."""
    assert jax.default_backend() == "gpu", "these need a Hopper GPU"
    for seed in range(2):
        inputs = arg_specs.make_inputs(CASES[name], seed=seed)
        expected = np.asarray(expect(*inputs[:4], **inputs.cuts))
        tokens = np.asarray(run(*inputs[:4], **inputs.cuts))
        np.testing.assert_array_equal(tokens, np.asarray(run(*inputs[:4], **inputs.cuts)))  # races would show
        rows = np.flatnonzero(tokens != expected)
        if len(rows):
            assert (near_ties(inputs, rows, tokens[rows], expected[rows]) < 1e-4).all()
            assert (np.asarray(inputs.temperature)[rows] > 0).all()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    spec = dataclasses.replace(CASES["top-k and top-p"], temperatures=(1.0, 0.5))
    inputs = arg_specs.make_inputs(spec, seed=7)
    together = np.asarray(run(*inputs[:4], **inputs.cuts))
    order = np.random.default_rng(0).permutation(spec.num_rows)
    for rows in (order, order[:1], order[1:2]):
        part = run(*(x[rows] for x in inputs[:4]), **_rows(inputs, rows))
        np.testing.assert_array_equal(np.asarray(part), together[rows])


def test_exactly_what_the_cuts_keep_is_drawn() -> None:
    """So hot that all kept ids are equally likely: 256 draws meet each of 20, ties and all."""
    spec = dataclasses.replace(CASES["256 rows"], temperatures=(1e5,), levels=8)
    inputs = arg_specs.make_inputs(spec, seed=1)
    logits = jnp.broadcast_to(inputs.logits[:1], inputs.logits.shape)
    order = np.argsort(-np.asarray(logits[0]), kind="stable")
    for top_k, top_p in ((20, 1.0), (V, 19.5 / V)):
        cuts = {"min_p": inputs.min_p, "top_k": jnp.full(256, top_k), "top_p": jnp.full(256, top_p)}
        tokens = run(logits, *inputs[1:4], **cuts)
        assert set(np.asarray(tokens).tolist()) == set(order[:20].tolist())


@pytest.mark.parametrize("num_rows", [1, 37, 256])
def test_slots_are_advanced_in_place(num_rows: int) -> None:
    """Many steps of one program."""
    rng = np.random.default_rng(num_rows)
    samples = rng.random(num_rows) < 0.9
    rows = (rng.permutation(300)[:num_rows].astype(np.int32), samples, np.ones(num_rows, np.int32))
    slots = reference.Slots(
        last_tokens=jnp.zeros(280, jnp.int32),  # some rows are padding
        num_computed=jnp.asarray(rng.integers(0, 1000, 280, np.int32)),
        temperature=jnp.asarray(rng.integers(0, 2, 280).astype(np.float32)),
        seeds=jnp.asarray(rng.integers(0, 2**32, (280, 2), np.uint32)),
    )
    logits = arg_specs.make_inputs(Spec(num_rows, V), seed=num_rows).logits
    step, expect_step = jax.jit(mosaic_gpu.sample_slots, donate_argnums=4), jax.jit(reference.sample_slots)
    expected = slots
    for _ in range(50):
        tokens, slots = step(logits, *rows, jax.tree.map(jnp.copy, slots))
        wanted, expected = expect_step(logits, *rows, expected)
        same = np.mean(np.asarray(tokens) == np.asarray(wanted))
        assert same > 0.99 or num_rows == 1  # two scores may be within rounding
        np.testing.assert_array_equal(slots.num_computed, expected.num_computed)
