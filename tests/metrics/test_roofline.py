"""Rooflines against figures known from elsewhere, and the ideal engine against its own rules."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.config import ModelConfig, RopeConfig
from jaxinfer.metrics.floor import Limits, find_floor
from jaxinfer.metrics.roofline import ModelShape, Precision, Roof, StepWork, cost_of, find_roof
from jaxinfer.metrics.shapes import SHAPES, hf_config
from jaxinfer.metrics.workload import Job, draw_nano

LLAMA_70B = ModelShape(
    hidden_size=8192,
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=28_672,
    vocab_size=128_256,
)
H200 = Roof(4.4e12, 790e12, "measured")
BASELINE_LIMITS = Limits(max_num_seqs=256, max_num_batched_tokens=4096)


def decode_cost(shape: ModelShape, rows: int, context: int, precision: Precision = Precision()):  # noqa: B008
    work = StepWork()
    work.add_decode(rows, rows * context)
    return cost_of(work, shape, precision)


def test_kv_bytes_a_token():
    assert LLAMA_70B.kv_bytes_per_token(2) == 327_680
    assert 4096 * LLAMA_70B.kv_bytes_per_token(2) == pytest.approx(1.34e9, rel=2e-3)
    assert SHAPES["0.6b"].kv_bytes_per_token(2) == 114_688


def test_decode_of_70b():
    """47 ms at 3 TB/s counts all parameters; the embedding, of which a step reads a row a token, is 1.5% of them."""
    assert LLAMA_70B.num_parameters == pytest.approx(70.6e9, rel=2e-3)
    seconds = decode_cost(LLAMA_70B, 1, 1).seconds(Roof(3e12, 1e15, "data sheet"))
    assert seconds == pytest.approx(47e-3, rel=0.02)


@pytest.mark.parametrize(("name", "billions"), [("0.6b", 0.596), ("8b", 8.19), ("30b-a3b", 30.53)])
def test_parameters_of_the_named_shapes(name, billions):
    assert SHAPES[name].num_parameters == pytest.approx(billions * 1e9, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "rows", "context", "milliseconds"),
    [
        ("0.6b", 1, 128, 0.27),
        ("8b", 1, 128, 3.44),
        ("30b-a3b", 1, 128, 1.38),
        ("0.6b", 256, 1088, 7.5),
        ("8b", 256, 1088, 12.8),
        ("30b-a3b", 32, 128, 12.1),
    ],
)
def test_decode_steps_of_the_baselines(name, rows, context, milliseconds):
    """The tolerance is the logits (300 MB at 256 rows), which the baselines leave out, and their last digit."""
    assert decode_cost(SHAPES[name], rows, context).seconds(H200) * 1e3 == pytest.approx(milliseconds, rel=0.02)


@pytest.mark.parametrize(
    ("name", "seconds", "weight_tb", "kv_tb"),
    [("0.6b", 3.6, 1.2, 13.85), ("8b", 10.3, 15.5, 17.8), ("30b-a3b", 17.1, 58.5, 11.9)],
)
def test_nano_bench(name, seconds, weight_tb, kv_tb):
    """The baselines compute all prompts first; the ideal engine in chunks beside running rows: a few percent less."""
    floor = find_floor(draw_nano(151_936), SHAPES[name], H200, BASELINE_LIMITS, Precision())
    assert floor.seconds == pytest.approx(seconds, rel=0.02)
    assert floor.cost.kv_bytes == pytest.approx(kv_tb * 1e12, rel=0.01)
    assert floor.cost.weight_bytes == pytest.approx(weight_tb * 1e12, rel=0.06)  # 36 steps more than 1,023
    assert 1024 <= floor.num_steps <= 1024 + 142_827 // 4096 + 1


def test_which_side_binds():
    """Decoding is far below the ridge, a long prompt above it."""
    prefill = StepWork()
    prefill.add_chunk(0, 4096, samples=True)
    assert (
        decode_cost(SHAPES["8b"], 32, 1024).intensity
        < H200.ridge
        < cost_of(prefill, SHAPES["8b"], Precision()).intensity
    )


def test_pairs_of_chunks_add_up():
    """A prompt has the same pairs, whole or in chunks: 10 * 11 / 2."""
    whole, parts = StepWork(), StepWork()
    whole.add_chunk(0, 10, samples=True)
    parts.add_chunk(0, 4, samples=False)
    parts.add_chunk(4, 6, samples=True)
    assert whole.num_pairs == parts.num_pairs == 55
    assert whole.num_sampled == parts.num_sampled == 1


def test_a_step_without_samples_needs_no_head():
    silent, sampling = StepWork(), StepWork()
    silent.add_chunk(0, 8, samples=False)
    sampling.add_chunk(0, 8, samples=True)
    shape = SHAPES["0.6b"]
    less, more = cost_of(silent, shape, Precision()), cost_of(sampling, shape, Precision())
    assert more.weight_bytes - less.weight_bytes == 2 * shape.head_parameters
    assert more.operations - less.operations == 2 * shape.head_parameters
    assert less.logits_bytes == 0


def test_an_eight_bit_cache_halves_its_bytes_only():
    wide, narrow = decode_cost(SHAPES["8b"], 4, 100), decode_cost(SHAPES["8b"], 4, 100, Precision(2, 1))
    assert narrow.kv_bytes * 2 == wide.kv_bytes
    assert (narrow.weight_bytes, narrow.operations) == (wide.weight_bytes, wide.operations)


def test_experts_hit():
    """One token reads its 8 experts, very many tokens all 128."""
    shape = SHAPES["30b-a3b"]
    assert shape.parameters_read(1) == pytest.approx(shape.parameters_per_token)
    rest = shape.num_parameters - 2 * shape.head_parameters
    assert shape.parameters_read(10_000) == pytest.approx(rest)


def test_a_step_over_nothing_costs_nothing():
    assert cost_of(StepWork(), SHAPES["8b"], Precision()).seconds(H200) == 0
    assert cost_of(StepWork(), SHAPES["8b"], Precision()).intensity == 0


def test_shapes_of_models_and_of_unknown_devices():
    model = ModelConfig(
        architecture="Qwen3ForCausalLM",
        rope=RopeConfig(theta=1e6),
        max_position_embeddings=4096,
        rms_norm_eps=1e-6,
        **{name: getattr(SHAPES["0.6b"], name) for name in ModelShape.__dataclass_fields__ if "expert" not in name},
    )
    assert ModelShape.of(model) == SHAPES["0.6b"]
    assert find_roof("NVIDIA H200") == H200
    assert find_roof("an abacus") is None
    with pytest.raises(ValueError, match=r"known are 0\.6b, 8b, 30b-a3b"):
        hf_config("7b")


# -- the ideal engine ----------------------------------------------------------------------------

SMALL = ModelShape(
    hidden_size=8, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=16, vocab_size=32
)
JOBS = st.lists(
    st.builds(
        lambda prompt, output, arrival, cached: Job([0] * prompt, output, arrival, min(cached, prompt - 1)),
        st.integers(1, 40),
        st.integers(1, 12),
        st.floats(0, 1e-3),
        st.sampled_from([0, 0, 5]),
    ),
    max_size=12,
)


@settings(deadline=None)
@given(JOBS, st.integers(1, 4), st.integers(4, 32))
def test_every_job_gets_its_tokens_no_sooner_than_bytes_and_operations_allow(jobs, rows, budget):
    roof = Roof(1e9, 1e10, "data sheet")
    limits = Limits(max_num_seqs=rows, max_num_batched_tokens=budget)
    floor = find_floor(jobs, SMALL, roof, limits, Precision(4, 4))
    for job, record in zip(jobs, floor.records, strict=True):
        assert [count for _, count in record.events] == list(range(1, job.output_len + 1))
        assert record.ttft > 0
        assert all(gap > 0 for gap in record.itl)
    assert floor.seconds >= max(floor.cost.num_bytes / roof.bandwidth, floor.cost.operations / roof.peak) * (1 - 1e-9)
    assert 0 <= floor.memory_bound_seconds <= floor.seconds
    computed = sum(job.prompt_len - job.num_cached_tokens + job.output_len - 1 for job in jobs)
    pairs = sum(sum(range(job.num_cached_tokens + 1, job.prompt_len + job.output_len)) for job in jobs)
    sampled = sum(job.output_len for job in jobs)
    products = computed * SMALL.parameters_per_token + sampled * SMALL.head_parameters
    expected = 2 * products + 4 * SMALL.num_layers * SMALL.num_heads * SMALL.head_dim * pairs
    assert floor.cost.operations == pytest.approx(expected)
    assert floor.num_steps * budget >= computed


def test_rows_and_arrivals_hold_jobs_back():
    """One row at a time, and nobody before its time."""
    jobs = [Job([0] * 4, 3), Job([0] * 4, 3), Job([0] * 4, 3, arrival=50.0)]
    limits = Limits(max_num_seqs=1, max_num_batched_tokens=8)
    first, second, third = find_floor(jobs, SMALL, H200, limits, Precision()).records
    assert second.events[0][0] > first.events[-1][0]
    assert third.events[0][0] > 50.0
    assert third.ttft == pytest.approx(first.ttft)


def test_replicas_share_jobs_and_roof_but_not_weights():
    """Dealt out in turn, each half as on a device of its own; the busiest decides."""
    jobs = [Job([0] * 40, 9), Job([0] * 8, 30), Job([0] * 24, 5), Job([0] * 8, 2)]
    alone = [find_floor(jobs[first::2], SMALL, H200, BASELINE_LIMITS, Precision()) for first in range(2)]
    pair = dataclasses.replace(H200, bandwidth=2 * H200.bandwidth, peak=2 * H200.peak)
    limits = Limits(**{name: 2 * value for name, value in dataclasses.asdict(BASELINE_LIMITS).items()})
    together = find_floor(jobs, SMALL, pair, limits, Precision(), num_replicas=2)
    assert together.seconds == max(floor.seconds for floor in alone) == alone[1].seconds
    assert [record.events for record in together.records[1::2]] == [record.events for record in alone[1].records]
    assert [record.events for record in together.records[::2]] == [record.events for record in alone[0].records]
    assert together.cost.weight_bytes == sum(floor.cost.weight_bytes for floor in alone)
    assert together.seconds > find_floor(jobs, SMALL, pair, limits, Precision()).seconds  # one of twice the size


def test_no_jobs():
    floor = find_floor([], SMALL, H200, BASELINE_LIMITS, Precision())
    assert (floor.records, floor.num_steps, floor.seconds) == ([], 0, 0.0)
