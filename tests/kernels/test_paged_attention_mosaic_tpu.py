"""The TPU's paged attention against the reference, in the TPU interpreter."""

import dataclasses
from functools import cache, partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

from jaxinfer.kernels.paged_attention import arg_specs, mosaic_tpu, mosaic_tpu_kernel, reference
from jaxinfer.kernels.paged_attention.arg_specs import Spec

WINDOW = dataclasses.replace(
    arg_specs.SMALL["mixed, window, softcap, sinks, odd group, small blocks"],
    head_dim=128,
    padding_rows=1,
    padding_tokens=3,
)
TILES = Spec((1, 9, 3, 5), (40, 30, 3, 60), head_dim=128, block_size=32, dtype="float32")
WIDE = {name: spec for name, spec in arg_specs.WIDE.items() if spec.head_dim == 128 and spec.dtype == "bfloat16"} | {
    f"{name}, block {block_size}, {dtype}": dataclasses.replace(spec, head_dim=128, block_size=block_size, dtype=dtype)
    for (name, spec), block_size in zip(arg_specs.SMALL.items(), (96, 128, 256), strict=True)
    for dtype in ("bfloat16", "float32")
}


@cache
def program(spec: Spec, detect_races: bool):
    """One for all batches of the same options and shapes."""
    params = pltpu.InterpretParams(detect_races=detect_races)
    return jax.jit(partial(mosaic_tpu.paged_attention, **options(spec), interpret=params))


@cache
def reference_program(spec: Spec):
    return jax.jit(partial(reference.paged_attention, **options(spec)))


def options(spec: Spec) -> dict:
    sinks = arg_specs.make_sinks(spec)
    return {"scale": spec.head_dim**-0.5, "window": spec.window, "softcap": spec.softcap, "sinks": sinks}


def run(spec: Spec, inputs: arg_specs.Inputs, *, detect_races: bool = True, **plan) -> jax.Array:
    out = jax.block_until_ready(program(spec, detect_races)(*inputs, **plan))
    if detect_races:
        assert not interpreter.races.races_found
    return out


def check(spec: Spec, *, seed: int, detect_races: bool = True) -> None:
    inputs = arg_specs.make_inputs(spec, seed=seed)
    assert_close(spec, inputs, run(spec, inputs, detect_races=detect_races))


def assert_close(spec: Spec, inputs: arg_specs.Inputs, out: jax.Array) -> None:
    tokens = int(inputs.query_start_loc[-1])
    expected = reference_program(spec)(*inputs)
    got, expected = (np.asarray(x[:tokens].astype(jnp.float32)) for x in (out, expected))
    tolerance = 5e-3 if spec.dtype == "bfloat16" else 1e-5
    assert np.linalg.norm(got - expected) < tolerance * np.linalg.norm(expected)
    assert not np.asarray(out[tokens:].astype(jnp.float32)).any()


@pytest.mark.parametrize(
    "spec",
    [WINDOW, pytest.param(TILES, marks=pytest.mark.slow)],
    ids=["window, softcap, sinks, odd group", "tiles of several rows"],
)
def test_matches_the_reference(spec: Spec) -> None:
    check(spec, seed=0)


def test_unused_slots_change_no_bit() -> None:
    clean, poisoned = (arg_specs.make_inputs(WINDOW, seed=2, unused=unused) for unused in (0.0, float("nan")))
    # What lies before the window of every query is unused as well.
    blocks, rest = divmod(WINDOW.seq_lens[0] - WINDOW.window, WINDOW.block_size)
    table = np.asarray(poisoned.block_tables)[0]

    def poison(pool: jax.Array) -> jax.Array:
        return pool.at[table[:blocks]].set(jnp.nan).at[table[blocks], :, :rest].set(jnp.nan)

    poisoned = poisoned._replace(k_cache=poison(poisoned.k_cache), v_cache=poison(poisoned.v_cache))
    a, b = (np.asarray(run(WINDOW, x)) for x in (clean, poisoned))
    np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


@pytest.mark.slow
def test_a_plan_of_decode_rows_alone() -> None:
    """Few tokens for many rows, and a launch less."""
    spec = Spec((1, 1, 1), (100, 64, 1), head_dim=128, padding_rows=4)
    inputs = arg_specs.make_inputs(spec, seed=1)
    kind = {"num_tokens": spec.num_tokens, "num_heads": spec.num_heads, "head_dim": spec.head_dim}
    plan = mosaic_tpu.plan(inputs.seq_lens, inputs.query_start_loc, **kind, max_query_len=1)
    assert plan.prefill is None
    assert_close(spec, inputs, run(spec, inputs, step_plan=plan))


def test_plan_covers_every_token_once() -> None:
    query_lens, seq_lens = (1, 1, 70, 5, 1, 129, 64, 0), (9, 4, 80, 5, 30, 1000, 64, 0)
    starts = np.cumsum((0, *query_lens)).astype(np.int32)
    plan = jax.jit(partial(mosaic_tpu.plan, num_tokens=280, num_heads=32, head_dim=128))(
        jnp.asarray(seq_lens, jnp.int32), jnp.asarray(starts)
    )
    covered = []
    for tiles in (plan.decode, plan.prefill):
        items = np.asarray(tiles.items).reshape(-1, mosaic_tpu_kernel.FIELDS)
        assert int(tiles.count[0]) <= len(items)
        for row, token, low, high, position in items[: int(tiles.count[0])]:
            assert 0 <= low < high <= tiles.tokens
            assert position == seq_lens[row] - query_lens[row] + token - starts[row]
            covered += range(token + low, token + high)
            assert starts[row] <= token + low < token + high <= starts[row + 1]
    assert covered == list(range(starts[-1]))
    assert int(plan.decode.count[0]) == 2


@pytest.mark.parametrize(("rows", "length"), [(300, 2), (5, mosaic_tpu.ALIGN - 1), (64, 66)])
def test_plan_has_room_for_many_rows(rows: int, length: int) -> None:
    starts = np.arange(rows + 1, dtype=np.int32) * length
    kind = {"num_tokens": rows * length, "num_heads": 128, "head_dim": 128}
    plan = jax.jit(partial(mosaic_tpu.plan, **kind))(np.diff(starts), starts)
    assert int(plan.prefill.count[0]) * mosaic_tpu_kernel.FIELDS <= plan.prefill.items.size


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 64}, "head_dim 64"),
        ({"block_size": 24}, "block_size 24"),
        ({"dtype": "float16"}, "float16"),
        ({"num_heads": 256, "num_kv_heads": 256}, "bytes of VMEM"),
        ({"table_width": 1 << 16}, "bytes of SMEM"),
        ({"k_scale": 2.0}, "k_scale"),
    ],
)
def test_says_what_it_cannot_do(change: dict, words: str) -> None:
    kind = {"num_heads": 4, "num_kv_heads": 2, "block_size": 32, "head_dim": 128, "dtype": "bfloat16"} | change
    q = jax.ShapeDtypeStruct((8, kind["num_heads"], kind["head_dim"]), kind["dtype"])
    page = jax.ShapeDtypeStruct((9, kind["num_kv_heads"], kind["block_size"], kind["head_dim"]), kind["dtype"])
    tables = jax.ShapeDtypeStruct((8, kind.get("table_width", 4)), jnp.int32)
    with pytest.raises(NotImplementedError, match=words):
        mosaic_tpu.check_supported(q, page, block_tables=tables, k_scale=kind.get("k_scale"))


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDE)
def test_wide_grid(name: str) -> None:
    check(WIDE[name], seed=3, detect_races=False)


def ragged(decode_lens: list[int], prefill_rows: list[tuple[int, int]], seed: int, *, tokens: int) -> None:
    """Rows after the leading decode rows may have one token too. Equal shapes, so that few programs are compiled."""
    query_lens = (1,) * len(decode_lens) + tuple(new for new, _ in prefill_rows)
    seq_lens = (*decode_lens, *(new + cached for new, cached in prefill_rows))
    padding = {"padding_rows": 8 - len(query_lens), "padding_tokens": tokens - sum(query_lens)}
    spec = Spec(query_lens, seq_lens, head_dim=128, num_heads=2, num_kv_heads=1, block_size=16, **padding)
    inputs = arg_specs.make_inputs(spec, seed=seed)
    missing = 64 - inputs.k_cache.shape[0]
    grow = ((0, missing), (0, 0), (0, 0), (0, 0))
    tables = jnp.pad(inputs.block_tables, ((0, 0), (0, 12 - inputs.block_tables.shape[1])))
    inputs = inputs._replace(
        k_cache=jnp.pad(inputs.k_cache, grow), v_cache=jnp.pad(inputs.v_cache, grow), block_tables=tables
    )
    shapes = dataclasses.replace(spec, query_lens=(), seq_lens=(), padding_rows=0, padding_tokens=tokens)
    assert_close(shapes, inputs, run(shapes, inputs))


@hypothesis.settings(max_examples=3, deadline=None, derandomize=True)
@hypothesis.given(
    decode_lens=st.lists(st.integers(1, 80), min_size=1, max_size=3),
    prefill_rows=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 40)), min_size=1, max_size=3),
    seed=st.integers(0, 1000),
)
def test_ragged_batches(decode_lens: list[int], prefill_rows: list[tuple[int, int]], seed: int) -> None:
    ragged(decode_lens, prefill_rows, seed, tokens=64)


@pytest.mark.slow
@hypothesis.settings(max_examples=30, deadline=None)
@hypothesis.given(
    decode_lens=st.lists(st.integers(1, 170), max_size=4),
    prefill_rows=st.lists(st.tuples(st.integers(1, 70), st.integers(0, 100)), max_size=4),
    seed=st.integers(0, 2**31 - 1),
)
def test_more_ragged_batches(decode_lens: list[int], prefill_rows: list[tuple[int, int]], seed: int) -> None:
    hypothesis.assume(decode_lens or prefill_rows)
    ragged(decode_lens, prefill_rows, seed, tokens=288)
