"""The pipeline against NumPy row by row, distributions by chi-square, noise, and the rows' independence."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy_sampler import chi_square_p, probabilities, process

from jaxinfer.batch import Carry, DeviceShapes, Features, Rows, features_from_columns
from jaxinfer.core import Request, SamplingParams
from jaxinfer.engine.inputs import cut_values, feature_values
from jaxinfer.kernels.sampling.noise import Stream, gumbel, row_keys, uniform
from jaxinfer.kernels.sampling.reference import cut, draw, keep_top_k, keep_top_p
from jaxinfer.sampling import sample_cut, sample_full, sample_plain
from jaxinfer.sampling.sampler import adjust

V = 300
SHAPES = DeviceShapes(num_slots=8, max_blocks=4, max_len=64, vocab_size=V)
full = jax.jit(sample_full)
plain = jax.jit(sample_plain)
cut_only = jax.jit(sample_cut)


@jax.jit
def run_process(logits, carry: Carry, features: Features, positions):
    """The whole pipeline up to the choice."""
    adjusted = adjust(logits, features, positions)
    return cut(adjusted, carry.temperature, min_p=carry.min_p, top_k=carry.top_k, top_p=carry.top_p)


def make_request(params: SamplingParams, prompt=(1, 2, 3), output=(), end_ids=(), bad_words=(), seed=0) -> Request:
    request = Request(
        "r",
        list(prompt),
        params,
        100,
        seed=seed,
        eos_token_ids=frozenset(end_ids),
        bad_word_ids=tuple(bad_words),
    )
    request.token_ids += list(output)
    return request


def stack_features(requests: list[Request]) -> Features:
    columns = {}
    for name, (where, dtype) in SHAPES.feature_layout.columns.items():
        if name != "slot_ids":
            rows = [
                np.resize(np.asarray(feature_values(r, SHAPES)[name], dtype), where.stop - where.start)
                for r in requests
            ]
            columns[name] = jnp.asarray(np.stack(rows))
    return features_from_columns(columns)


def state(requests: list[Request]) -> tuple[Carry, Features, Rows]:
    """Slot n belongs to request n."""
    count = len(requests)
    carry = Carry(
        last_tokens=jnp.zeros(count, jnp.int32),
        num_computed=jnp.array([r.num_tokens - 1 for r in requests], jnp.int32),
        temperature=jnp.array([r.params.temperature for r in requests], jnp.float32),
        seeds=jnp.array([[r.seed & 0xFFFFFFFF, r.seed >> 32] for r in requests], jnp.uint32),
        min_p=jnp.array([cut_values(r.params)["min_p"] for r in requests], jnp.float32),
        top_k=jnp.array([cut_values(r.params)["top_k"] for r in requests], jnp.int32),
        top_p=jnp.array([cut_values(r.params)["top_p"] for r in requests], jnp.float32),
        uses_features=jnp.array([r.params.needs_full_sampler for r in requests]),
    )
    rows = Rows(jnp.arange(count, dtype=jnp.int32), jnp.ones(count, bool), jnp.ones(count, jnp.int32))
    return carry, stack_features(requests), rows


def choose_all(requests: list[Request], logits: np.ndarray, repeats: int = 1) -> np.ndarray:
    """Tokens [repeats, rows] at successive positions."""
    carry, features, rows = state(requests)
    out = []
    for _ in range(repeats):
        carry, features, output = full(carry, features, jnp.asarray(logits), rows)
        out.append(np.asarray(output.tokens))
    return np.array(out)


FEATURES = {
    "temperature": {"temperature": 0.7},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.1},
    "cuts": {"top_k": 40, "top_p": 0.8, "min_p": 0.02, "temperature": 1.3},
    "bias": {"logit_bias": {5: 4.0, 9: -3.0}},
    "allowed": {"allowed_token_ids": [3, 5, 7, 290]},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.4},
    "min_tokens": {"min_tokens": 9, "max_tokens": 20},
    "all": {"temperature": 0.8, "top_k": 90, "top_p": 0.95, "min_p": 0.001, "logit_bias": {11: 2.0},
            "repetition_penalty": 1.2, "presence_penalty": -0.5, "allowed_token_ids": list(range(0, 300, 2))},
}  # fmt: skip
OUTPUT = (4, 5, 5, 8, 20)
ENDS = (0, 8, 299)
WORDS = ((30,), (5, 8, 20, 31), (8, 20, 32), (7, 20, 33))


@pytest.mark.parametrize("name", FEATURES)
def test_pipeline_equals_numpy_row_by_row(name):
    """All features in one batch: no row influences another."""
    rng = np.random.default_rng(3)
    names = [name, *(other for other in FEATURES if other != name)][:6]
    requests = [make_request(SamplingParams(**FEATURES[n]), (1, 2, 5), OUTPUT, ENDS, WORDS) for n in names]
    logits = (rng.standard_normal((len(requests), V)) * 3).astype(np.float32)
    logits[:, 40:50] = logits[:, 40:41]  # ties
    carry, features, _ = state(requests)
    positions = jnp.array([r.num_tokens for r in requests], jnp.int32)
    got = np.asarray(run_process(jnp.asarray(logits), carry, features, positions))
    for row, request in enumerate(requests):
        want = process(logits[row], request.params, request.prompt_token_ids, request.output_token_ids, ENDS, WORDS)
        np.testing.assert_array_equal(np.isfinite(got[row]), np.isfinite(want), err_msg=names[row])
        finite = np.isfinite(want)
        np.testing.assert_allclose(got[row][finite], want[finite], atol=2e-5)


@pytest.mark.parametrize("name", FEATURES)
def test_distribution(name):
    """Chi-square of 20,000 draws against the NumPy probabilities; fixed seeds."""
    rng = np.random.default_rng(9)
    logits = (rng.standard_normal(V) * 2).astype(np.float32)
    params = SamplingParams(**{"temperature": 1.0, **FEATURES[name]})
    request = make_request(params, (1, 2, 5), OUTPUT, ENDS, WORDS)
    want = probabilities(process(logits, params, [1, 2, 5], list(OUTPUT), ENDS, WORDS))
    carry, features, _ = state([request])
    position = jnp.array([request.num_tokens], jnp.int32)
    scaled = run_process(jnp.asarray(logits[None]), carry, features, position)
    count = 20_000
    seeds = jnp.stack([jnp.arange(count, dtype=jnp.uint32), jnp.zeros(count, jnp.uint32)], axis=1)
    draws = jax.jit(draw)(jnp.broadcast_to(scaled, (count, V)), seeds, jnp.full(count, 17, jnp.int32))
    counts = np.bincount(np.asarray(draws), minlength=V)
    assert counts[want == 0].sum() == 0
    assert chi_square_p(counts[want > 0], want[want > 0] * count) > 1e-4


def test_distribution_over_positions():
    """The draws of one seed at successive positions are independent of each other, too."""
    logits = np.linspace(-1, 1, 8, dtype=np.float32)
    count = 20_000
    positions = jnp.arange(count, dtype=jnp.int32)
    scaled = jnp.broadcast_to(jnp.asarray(logits - logits.max()), (count, 8))
    draws = np.asarray(jax.jit(draw)(scaled, jnp.full((count, 2), 5, jnp.uint32), positions))
    p = probabilities(logits)
    assert chi_square_p(np.bincount(draws, minlength=8), p * count) > 1e-4
    pairs = np.bincount(draws[:-1:2] * 8 + draws[1::2], minlength=64)
    assert chi_square_p(pairs, np.outer(p, p).reshape(-1) * (count // 2)) > 1e-4


def test_noise_is_uniform_and_streams_differ():
    count = 50_000
    seeds = jnp.stack([jnp.arange(count, dtype=jnp.uint32), jnp.full(count, 3, jnp.uint32)], axis=1)
    positions = jnp.zeros(count, jnp.int32)
    samples = {stream: np.asarray(uniform(row_keys(seeds, positions, stream))) for stream in Stream}
    for values in samples.values():
        counts = np.histogram(values, bins=50, range=(0, 1))[0]
        assert chi_square_p(counts, np.full(50, count / 50)) > 1e-4
    first, second = samples[Stream.SAMPLE], samples[Stream.ACCEPT]
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.02
    g = np.asarray(
        gumbel(row_keys(seeds[:400], positions[:400], Stream.SAMPLE), jnp.arange(200, dtype=jnp.int32)[None])
    )
    assert np.isfinite(g).all()
    counts = np.histogram(np.exp(-np.exp(-g.astype(np.float64))).ravel(), bins=50, range=(0, 1))[0]
    assert chi_square_p(counts, np.full(50, g.size / 50)) > 1e-4


def test_both_words_of_a_seed_matter():
    requests = [make_request(SamplingParams(seed=s), seed=s % 2**64) for s in (5, 2**32 + 5, 5, -1, 2**63)]
    tokens = choose_all(requests, np.zeros((5, V), np.float32), 40).T
    assert (tokens[0] == tokens[2]).all()
    for other in (1, 3, 4):
        assert (tokens[0] != tokens[other]).mean() > 0.9


def test_mixed_rows_equal_their_solo_runs():
    """B7, B10: any order, any neighbours, plain or full program: the same tokens."""
    rng = np.random.default_rng(1)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"presence_penalty": 2.0},
        {"top_k": 5},
        {"min_p": 0.2},
    ]
    requests = [make_request(SamplingParams(**kind), seed=42 + n) for n, kind in enumerate(kinds)]
    logits = (rng.standard_normal((len(kinds), V)) * 2).astype(np.float32)
    together = choose_all(requests, logits, 30)
    for order in (range(4, -1, -1), [2, 0, 4, 1, 3]):
        other = choose_all([requests[n] for n in order], logits[list(order)], 30)
        np.testing.assert_array_equal(other, together[:, list(order)])
    for n, request in enumerate(requests):
        np.testing.assert_array_equal(choose_all([request], logits[n : n + 1], 30)[:, 0], together[:, n])
    carry, _, rows = state(requests[:2])
    for step in range(30):
        carry, output = plain(carry, jnp.asarray(logits[:2]), rows)
        np.testing.assert_array_equal(np.asarray(output.tokens), together[step, :2])


def test_rows_that_are_only_cut_take_the_full_programs_tokens():
    kinds = [{"top_k": 5}, {"temperature": 0.0}, {"top_p": 0.7}, {"min_p": 0.1, "top_k": 30, "top_p": 0.9}]
    requests = [make_request(SamplingParams(**kind), seed=7 + n) for n, kind in enumerate(kinds)]
    logits = (np.random.default_rng(4).standard_normal((len(kinds), V)) * 2).astype(np.float32)
    expected = choose_all(requests, logits, 20)
    carry, _, rows = state(requests)
    for step in range(20):
        carry, output = cut_only(carry, jnp.asarray(logits), rows)
        np.testing.assert_array_equal(np.asarray(output.tokens), expected[step])
    assert carry.num_computed.tolist() == [request.num_tokens + 19 for request in requests]
    np.testing.assert_array_equal(carry.last_tokens, expected[-1])


def test_rows_that_use_no_feature_are_passed_by_a_former_owners():
    requests = [make_request(SamplingParams(), seed=5), make_request(SamplingParams(logit_bias={3: 1.0}), seed=6)]
    logits = (np.random.default_rng(4).standard_normal((2, V)) * 2).astype(np.float32)
    carry, features, rows = state(requests)
    former = dataclasses.replace(features, bias_values=features.bias_values.at[:, 0].set(90.0))
    former = dataclasses.replace(former, bias_ids=former.bias_ids.at[:, 0].set(77))
    tokens = full(carry, former, jnp.asarray(logits), rows)[2].tokens
    assert tokens[0] == plain(carry, jnp.asarray(logits), rows)[1].tokens[0] != 77
    assert tokens[1] == 77


def test_implementations_are_named():
    carry, _, rows = state([make_request(SamplingParams())])
    with pytest.raises(NotImplementedError, match="no implementation 'fast'"):
        sample_plain(carry, jnp.zeros((1, V)), rows, implementation="fast")
    with pytest.raises(ValueError, match="float32"):
        sample_plain(carry, jnp.zeros((1, V), jnp.bfloat16), rows)


def test_temperatures_approach_greedy():
    """B1: 1, 1e-2 .. 1e-8, 0; no NaN."""
    logits = np.random.default_rng(0).standard_normal((1, V)).astype(np.float32) * 4
    best = int(logits.argmax())
    for temperature in (1e-2, 1e-3, 1e-4, 1e-6, 1e-8, 1e-40, 0.0):
        request = make_request(SamplingParams(temperature=temperature), seed=3)
        tokens = choose_all([request], logits, 20)
        assert (tokens == best).all() or temperature == 1e-2
        assert (tokens >= 0).all()


def test_greedy_takes_the_lowest_of_equal_maxima():
    """B4: with k = 1 too."""
    logits = np.zeros((2, V), np.float32)
    logits[:, [17, 140, 299]] = 2.5
    requests = [make_request(SamplingParams(temperature=0.0)), make_request(SamplingParams(top_k=1), seed=8)]
    assert (choose_all(requests, logits, 10) == 17).all()


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_off_means_the_whole_vocabulary(top_k):
    """B2."""
    request = make_request(SamplingParams(top_k=top_k, min_p=1e-9), seed=1)
    assert len(set(choose_all([request], np.zeros((1, V), np.float32), 200)[:, 0])) > 100


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    top_k=st.integers(1, V + 20),
    top_p=st.floats(1e-6, 1.0),
    levels=st.sampled_from([2, 5, 1000]),
)
def test_cuts_are_exact_with_ties(seed, top_k, top_p, levels):
    """Exactly k remain, in the order (logit descending, id ascending); top-p keeps the shortest prefix."""
    logits = np.random.default_rng(seed).integers(-levels, levels, V).astype(np.float32) / levels * 3
    logits -= logits.max()
    order = np.array(sorted(range(V), key=lambda token: (-logits[token], token)))
    kept = np.flatnonzero(np.isfinite(_top_k(jnp.asarray(logits[None]), jnp.array([min(top_k, V)], jnp.int32))[0]))
    assert set(kept) == set(order[:top_k])
    top_p = np.float32(top_p)
    kept = set(np.flatnonzero(np.isfinite(_top_p(jnp.asarray(logits[None]), jnp.array([top_p]))[0])))
    weights = np.exp(logits[order].astype(np.float64))
    before = np.concatenate([[0.0], np.cumsum(weights)[:-1]]) / weights.sum()
    clear = np.abs(before - top_p) > 1e-5
    assert kept >= set(order[clear & (before < top_p)])
    assert not kept & set(order[clear & (before >= top_p)]) or top_p == 1
    assert kept == set(order[: len(kept)])
    assert order[0] in kept


_top_k, _top_p = jax.jit(keep_top_k), jax.jit(keep_top_p)


@pytest.mark.parametrize(
    ("bad", "where"), [(np.nan, slice(None)), (np.nan, 7), (-np.inf, slice(None)), (np.inf, slice(None)), (np.inf, 7)]
)
def test_a_row_without_a_choice_says_so_alone(bad, where):
    logits = np.zeros((3, V), np.float32)
    logits[1, where] = bad
    requests = [make_request(SamplingParams(top_k=3), seed=n) for n in range(3)]
    carry, features, rows = state(requests)
    _, _, output = full(carry, features, jnp.asarray(logits), rows)
    _, plain_output = plain(carry, jnp.asarray(logits), rows)
    for tokens in (output.tokens, plain_output.tokens):
        assert [token < 0 for token in np.asarray(tokens).tolist()] == [False, True, False]


@pytest.mark.parametrize("top_p", [1e-40, 1e-46, 1e-38])
def test_the_best_survives_any_top_p(top_p):
    logits = np.random.default_rng(0).standard_normal((1, V)).astype(np.float32)
    request = make_request(SamplingParams(top_p=top_p), seed=2)
    assert (choose_all([request], logits, 5) == logits.argmax()).all()


def test_padding_rows_change_nothing():
    requests = [make_request(SamplingParams(top_k=3), seed=n) for n in range(2)]
    carry, features, _ = state(requests)
    rows = Rows(jnp.array([2, 1, 2], jnp.int32), jnp.array([False, True, False]), jnp.array([0, 1, 0], jnp.int32))
    after, changed, _ = full(carry, features, jnp.zeros((3, V)), rows)
    assert int(after.num_computed[0]) == int(carry.num_computed[0])
    assert int(after.num_computed[1]) == int(carry.num_computed[1]) + 1
    np.testing.assert_array_equal(changed.history[0], features.history[0])


def test_a_row_that_does_not_sample_keeps_its_token_and_history():
    requests = [make_request(SamplingParams(top_k=3), seed=1)]
    carry, features, rows = state(requests)
    rows = dataclasses.replace(rows, samples=jnp.array([False]))
    after, changed, _ = full(carry, features, jnp.zeros((1, V)), rows)
    assert int(after.last_tokens[0]) == int(carry.last_tokens[0])
    np.testing.assert_array_equal(changed.history, features.history)


def test_logprobs_are_raw_and_always_hold_the_sampled_token():
    """B14: whatever T and top_p; ranks count equal logits of lower ids."""
    rng = np.random.default_rng(2)
    logits = (rng.standard_normal((3, V)) * 2).astype(np.float32)
    kinds = [
        {"temperature": 0.1, "logprobs": 5},
        {"temperature": 5.0, "logprobs": 0},
        {"logit_bias": {50: 1e6}, "logprobs": 1},
    ]
    requests = [make_request(SamplingParams(**kind), seed=n) for n, kind in enumerate(kinds)]
    carry, features, rows = state(requests)
    _, _, output = full(carry, features, jnp.asarray(logits), rows)
    want = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum(axis=1, keepdims=True))
    for row, token in enumerate(np.asarray(output.tokens).tolist()):
        assert abs(float(output.logprobs.sampled[row]) - want[row, token]) < 1e-5
        assert int(output.logprobs.ranks[row]) == 1 + int((logits[row] > logits[row, token]).sum())
        order = np.argsort(-logits[row], kind="stable")[:20]
        np.testing.assert_array_equal(output.logprobs.top_ids[row], order)
        np.testing.assert_allclose(output.logprobs.top_values[row], want[row, order], atol=1e-5)
    assert int(output.tokens[2]) == 50


def test_penalties_by_where_a_token_stands():
    """B8: repetition counts prompt and output, the others output only."""
    logits = jnp.ones((1, V))
    for name, value, touched, change in [
        ("repetition_penalty", 2.0, {1, 2, 3, 9}, -0.5),
        ("frequency_penalty", 1.0, {9}, -2.0),
        ("presence_penalty", 1.0, {9}, -1.0),
    ]:
        request = make_request(SamplingParams(**{name: value}), (1, 2, 3), (9, 9))
        carry, features, _ = state([request])
        out = np.asarray(run_process(logits, carry, features, jnp.array([5], jnp.int32)))[0]
        assert set(np.flatnonzero(out < 0)) == touched
        assert out[9] == pytest.approx(change)


def test_history_follows_the_carry():
    """The device's history is what the host would upload: penalties of later steps see earlier samples."""
    request = make_request(SamplingParams(frequency_penalty=2.0, temperature=0.0), (1, 2))
    logits = np.zeros((1, V), np.float32)
    logits[0, :6] = [3.0, 2.5, 2.0, 1.5, 1.0, 0.5]
    got = choose_all([request], logits, 12)[:, 0].tolist()
    output: list[int] = []
    for _ in range(12):
        output.append(int(process(logits[0], request.params, [1, 2], output).argmax()))
    assert got == output


def test_vocabulary_padding_changes_no_draw():
    logits = np.random.default_rng(5).standard_normal((50, V)).astype(np.float32)
    logits -= logits.max(axis=1, keepdims=True)
    seeds, positions = jnp.full((50, 2), 9, jnp.uint32), jnp.arange(50, dtype=jnp.int32)
    padded = np.pad(logits, ((0, 0), (0, 212)), constant_values=-np.inf)
    np.testing.assert_array_equal(
        draw(jnp.asarray(logits), seeds, positions), draw(jnp.asarray(padded), seeds, positions)
    )
