"""Hopper's sampling kernels against the reference, in the GPU interpreter."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh
from numpy_sampler import process

from jaxinfer.core import SamplingParams
from jaxinfer.kernels.sampling import arg_specs, choose, mosaic_gpu, mosaic_gpu_memory, mosaic_gpu_tiles, reference
from jaxinfer.kernels.sampling.arg_specs import Inputs, Spec
from jaxinfer.kernels.sampling.mosaic_gpu_common import RowShape

H200 = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
TILES = mosaic_gpu_tiles.TilesParams(num_sms=1, counts_arrivals=False)
# Few CTAs and callbacks: a block of shared memory, a quarter of it at a time.
PARAMS = mosaic_gpu.Params(TILES, mosaic_gpu_memory.CutsParams(num_stages=1, slice_tiles=16))
V = 65 * 128
"""Two blocks of 64 tiles, which overlap."""


@contextlib.contextmanager
def interpreted(*, detect_races: bool = True) -> Iterator[None]:
    """Runs kernels in the GPU interpreter; fails if it saw a race."""
    params = plgpu.InterpretGPUParams(detect_races=detect_races)
    mesh = AbstractMesh((), (), abstract_device=H200)
    with plgpu.force_gpu_interpret_mode(params), jax.sharding.use_abstract_mesh(mesh):
        yield
    if detect_races:
        assert not interpreter.get_races().races_found


def run(inputs: Inputs) -> np.ndarray:
    """The tokens; kernels are programs of their own, since the interpreter may wait for ever beside other work."""
    with interpreted():
        return np.asarray(jax.block_until_ready(mosaic_gpu.sample(*inputs[:4], **inputs.cuts, params=PARAMS)))


def assert_same(inputs: Inputs, tokens: np.ndarray) -> None:
    expected = jax.jit(reference.sample)(*inputs[:4], **inputs.cuts)
    np.testing.assert_array_equal(tokens, np.asarray(expected))


CASES = {
    "not cut": Spec(2, V, (0.0, 0.7)),
    "top-k, top-p, ties": Spec(1, V, (3.0,), top_k=(9,), top_p=(0.9,), levels=3),
    "top-p, streamed until few tiles are left": Spec(1, V, (1.0,), top_p=(0.4,)),
    "min-p": Spec(2, V, (0.7, 1.3), min_p=(0.3, 0.1), top_k=(3, V), spread=3.0),
}
WIDE = {
    "whole blocks": Spec(3, 128 * 128, (0.0, 1.0)),
    "padded": Spec(3, 8300, (0.0, 1.0)),
    "padded, cut": Spec(3, 300, (1.0,), top_k=(5, 300, 299), top_p=(0.9, 0.5, 1.0)),
    "many ties": Spec(3, V, (1.0, 0.5), top_k=(2000, 50, 300), top_p=(0.9, 1.0, 0.7), levels=1),
    "top-p of many": Spec(3, V, (1.0,), top_p=(0.6, 0.95, 0.5)),
    "top-k of many": Spec(3, V, (1.0,), top_k=(1000, 8000, 8319)),
    "top-p": Spec(3, V, (1.0,), top_p=(0.5, 0.99, 0.01), peak=8.0),
    "all": Spec(4, V, (0.7, 0.0), min_p=(0.01, 0.0), top_k=(40, 7, V), top_p=(0.9, 1.0, 0.5), peak=8.0),
    "extreme temperatures": Spec(4, V, (1e-8, 1e-3, 50.0, 1e6), top_k=(20,), top_p=(0.9, 0.99)),
}


@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name: str) -> None:
    inputs = arg_specs.make_inputs(CASES[name], seed=1)
    assert_same(inputs, run(inputs))


@pytest.mark.parametrize("top_k", [None, 2])
def test_rows_without_a_choice_say_so(top_k: int | None) -> None:
    """Nothing but -inf, a NaN, an infinity; and of one row only one id is possible."""
    spec = Spec(4, V, (1.0,), top_k=None if top_k is None else (top_k,))
    inputs = arg_specs.make_inputs(spec, seed=2)
    logits = inputs.logits.at[0].set(-jnp.inf).at[1, 5].set(jnp.nan).at[2, 7].set(jnp.inf).at[3, 1:].set(-jnp.inf)
    rows = slice(None) if top_k is None else slice(2, 4)
    inputs = jax.tree.map(lambda x: x[rows], inputs._replace(logits=logits))
    tokens = run(inputs)
    assert tokens.tolist() == [-1, -1, -1, 0][rows]
    assert_same(inputs, tokens)


@pytest.mark.parametrize(("is_fused", "num_ctas"), [(False, 3), (True, 2), (True, 3)])
def test_slots_are_advanced_in_place(is_fused: bool, num_ctas: int) -> None:
    """A greedy row, a drawn one that does not sample, a padding row, one without a choice.

    Of three CTAs, two share a row; the interpreter takes their hand-over in one kernel for a race.
    """
    tiles = dataclasses.replace(TILES, num_sms=num_ctas, ctas_per_sm=1, is_fused=is_fused)
    params = dataclasses.replace(PARAMS, tiles=tiles)
    logits = arg_specs.make_inputs(Spec(4, V), seed=3).logits.at[3].set(jnp.nan)
    samples, num_tokens = jnp.array([True, False, False, True]), jnp.array([3, 1, 0, 1], jnp.int32)
    rows = (jnp.array([2, 0, 5, 4], jnp.int32), samples, num_tokens)
    slots = reference.Slots(
        last_tokens=jnp.arange(100, 105, dtype=jnp.int32),
        num_computed=jnp.arange(5, dtype=jnp.int32),
        temperature=jnp.array([0.7, 1.0, 0.0, 1.0, 1.0]),
        seeds=jnp.arange(10, dtype=jnp.uint32).reshape(5, 2),
    )
    expected = jax.jit(reference.sample_slots)(logits, *rows, slots)
    with interpreted(detect_races=not (is_fused and num_ctas == 3)):
        got = jax.block_until_ready(mosaic_gpu.sample_slots(logits, *rows, slots, params=params))
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert got[1].last_tokens.tolist()[:2] == [100, 101]
    assert got[1].last_tokens.tolist()[3:] == [103, 0]


def test_says_what_it_cannot_do() -> None:
    logits = jax.ShapeDtypeStruct((1, 2**20 + 1), jnp.float32)
    with pytest.raises(NotImplementedError, match="1048577 logits a row"):
        mosaic_gpu.sample(logits, None, None, None)
    assert choose("gpu", compute_capability="9.0", vocab=151936) == "mosaic_gpu"
    assert choose("gpu", compute_capability="9.0", vocab=2**20 + 1) == "reference"
    assert choose("gpu", compute_capability="8.0", vocab=151936) == "reference"
    assert choose("cpu", compute_capability="", vocab=151936) == "reference"


@pytest.mark.parametrize(("num_rows", "num_tiles", "num_ctas"), [(1, 1187, 19), (3, 1187, 7), (256, 384, 264)])
def test_every_block_has_a_cta(num_rows: int, num_tiles: int, num_ctas: int) -> None:
    shape = RowShape(num_tiles)
    shares = mosaic_gpu_tiles.Shares(num_rows, shape, num_ctas)
    ctas, numbers = np.arange(num_ctas, dtype=np.int32), np.arange(num_rows * shape.num_blocks, dtype=np.int32)
    first, count, owners = (
        np.asarray(f(x)) for f, x in ((shares.first, ctas), (shares.count, ctas), (shares.cta, numbers))
    )
    np.testing.assert_array_equal(np.repeat(ctas, count), owners)
    np.testing.assert_array_equal(first, np.searchsorted(owners, ctas))


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    vocab=st.sampled_from([200, V, 128 * 128]),
    temperature=st.sampled_from([0.5, 1.0, 4.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3]),
    top_k=st.sampled_from([0, 1, 3, 60, 1000]),
    top_p=st.sampled_from([0.2, 0.9, 0.999, 1.0]),
    levels=st.sampled_from([1, 8, None]),
    peak=st.sampled_from([0.0, 6.0]),
    seed=st.integers(0, 10**6),
)
def test_a_row_of_any_kind(vocab, temperature, min_p, top_k, top_p, levels, peak, seed) -> None:
    """The reference's token, and one that plain sorting in NumPy keeps."""
    cuts = {"min_p": (min_p,), "top_k": (top_k or vocab,), "top_p": (top_p,)}
    inputs = arg_specs.make_inputs(Spec(1, vocab, (temperature,), **cuts, levels=levels, peak=peak), seed=seed)
    tokens = run(inputs)
    assert_same(inputs, tokens)
    params = SamplingParams(temperature=temperature, min_p=min_p, top_k=top_k, top_p=min(top_p + 1e-5, 1.0))
    assert np.isfinite(process(np.asarray(inputs.logits[0]), params, [], [])[tokens[0]])


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_wide_grid(name: str) -> None:
    for seed in range(2):
        inputs = arg_specs.make_inputs(WIDE[name], seed=seed)
        assert_same(inputs, run(inputs))
