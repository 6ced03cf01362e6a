"""The reference of paged attention against NumPy: the specification of every other implementation."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_oracle import Case, attend, make_case
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxinfer.kernels.paged_attention import choose, paged_attention

MIXED = [(40, 1), (0, 1), (129, 1), (0, 17), (33, 40), (15, 1), (16, 16)]


attention = jax.jit(paged_attention, static_argnames=("scale", "window", "softcap", "implementation"))
"""One program a case: out of `jit`, each of its operations would be one."""


def run(case: Case, **options) -> np.ndarray:
    return np.asarray(attention(*case.arguments(), **options))


def check(case: Case, **options) -> None:
    want = attend(case, **options)
    sinks = options.pop("sinks", None)
    got = run(case, **options, sinks=None if sinks is None else jnp.asarray(sinks))
    np.testing.assert_allclose(got, want, atol=2e-5)


DECODE, PREFILL = [(30, 1), (0, 1), (7, 1)], [(0, 20)]
HEAD_DIMS = [64, 80, 96, 112, 120, 128, 192, 256]


@pytest.mark.parametrize(
    ("rows", "head_dim"),
    [(MIXED, head_dim) for head_dim in HEAD_DIMS]
    + [(rows, 120) for rows in (DECODE, PREFILL)]
    + [
        pytest.param(rows, head_dim, marks=pytest.mark.slow)
        for rows in (DECODE, PREFILL)
        for head_dim in HEAD_DIMS
        if head_dim != 120
    ],
    ids=str,
)
def test_head_dims(rows, head_dim):
    """F3."""
    check(make_case(rows, head_dim=head_dim), scale=head_dim**-0.5)


@pytest.mark.parametrize("block_size", [1, 5, 16, 96, 128, 192, 256])
def test_block_sizes(block_size):
    """F7: shuffled tables."""
    check(make_case(MIXED, block_size=block_size), scale=0.3)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (1, 8), (3, 3), (4, 1), (2, 5)])
def test_groups(kv_heads, group):
    check(make_case(MIXED, kv_heads=kv_heads, group=group), scale=0.25)


@pytest.mark.parametrize("options", [{"window": 1}, {"window": 20}, {"window": 500}, {"softcap": 2.0}, {"sinks": True},
                                     {"window": 33, "softcap": 5.0, "sinks": True}], ids=str)  # fmt: skip
def test_options(options):
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = np.array([0.5, -1.0, 3.0, 0.0])
    check(make_case(MIXED), scale=0.25, **options)


def test_quantised_caches_are_scaled():
    case = make_case(MIXED, filler=0.0)
    plain = attend(dataclasses.replace(case, k_cache=case.k_cache * 0.5, v_cache=case.v_cache * 3), scale=0.25)
    got = run(case, scale=0.25, k_scale=jnp.float32(0.5), v_scale=jnp.float32(3))
    np.testing.assert_allclose(got, plain, atol=5e-5)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    rows=st.lists(st.tuples(st.integers(0, 70), st.integers(1, 30)), min_size=1, max_size=6),
    block_size=st.sampled_from([4, 16, 64]),
    padding=st.integers(0, 9),
    seed=st.integers(0, 1000),
)
def test_ragged_batches(rows, block_size, padding, seed):
    """NaN in every unused slot and the null block; padding rows and tokens."""
    rows = sorted(rows, key=lambda row: row[1] > 1)
    tokens = sum(new for _, new in rows) + padding
    check(make_case(rows, block_size=block_size, padded_tokens=tokens, padded_rows=len(rows) + padding // 3, seed=seed),
          scale=0.25)  # fmt: skip


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
def test_unused_slots_change_no_bit(length):
    """F1: NaN against zeros, at block +-1, with padding rows."""
    rows = [(length - 1, 1), (0, 1), (0, length)]
    kinds = {"padded_tokens": length + 9, "padded_rows": 5}
    outputs = [run(make_case(rows, filler=filler, **kinds), scale=0.25) for filler in (0.0, np.nan, 1e30)]
    for other in outputs[1:]:
        np.testing.assert_array_equal(outputs[0], other)


def test_memory_does_not_grow_with_the_table():
    """A table a hundred times as wide costs no temporary memory of that order."""

    def temporary(width: int) -> int:
        f32, i32 = jnp.float32, jnp.int32
        q = jax.ShapeDtypeStruct((64, 4, 32), f32)
        page = jax.ShapeDtypeStruct((500, 2, 16, 32), f32)
        arguments = (q, page, page, jax.ShapeDtypeStruct((8, width), i32), jax.ShapeDtypeStruct((8,), i32),
                     jax.ShapeDtypeStruct((9,), i32))  # fmt: skip
        compiled = jax.jit(lambda *a: paged_attention(*a, scale=1.0)).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(4000) - temporary(40) < 2 * 64 * 4000 * 4


def test_misfits_are_refused():
    case = make_case(MIXED)
    with pytest.raises(ValueError, match="does not fit caches"):
        run(dataclasses.replace(case, q=case.q[:, :3]), scale=1.0)
    with pytest.raises(ValueError, match=r"seq_lens \(6,\)"):
        run(dataclasses.replace(case, seq_lens=case.seq_lens[:-1]), scale=1.0)
    with pytest.raises(NotImplementedError, match="'nothing'"):
        run(case, scale=1.0, implementation="nothing")


def test_who_serves_what():
    """Hopper's and the TPU's kernels where they can, the reference everywhere else."""
    kind = {"dtype": jnp.dtype(jnp.bfloat16), "num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "block_size": 64}
    assert choose("gpu", compute_capability="9.0", **kind) == "mosaic_gpu"
    assert choose("tpu", compute_capability="", **kind) == "mosaic_tpu"
    for change in ({"head_dim": 64}, {"cache_dtype": jnp.float8_e4m3fn}, {"table_shape": (512, 1024)}):
        assert choose("tpu", compute_capability="", **{**kind, **change}) == "reference"
    for platform, capability in (("gpu", "8.0"), ("gpu", "10.0"), ("cpu", "")):
        assert choose(platform, compute_capability=capability, **kind) == "reference"
    for change in ({"head_dim": 72}, {"dtype": jnp.dtype(jnp.float32)}, {"block_size": 48}, {"num_heads": 512}):
        assert choose("gpu", compute_capability="9.0", **{**kind, **change}) == "reference"
