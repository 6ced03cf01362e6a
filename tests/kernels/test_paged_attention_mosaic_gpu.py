"""The Hopper kernels against the reference, in the GPU interpreter."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from functools import cache, partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.kernels.paged_attention import arg_specs, mosaic_gpu, reference
from jaxinfer.kernels.paged_attention.arg_specs import Spec

# XLA's pool has a thread a core, read when the backend starts: on two, two waiting warpgroups block a third for ever.
os.environ.setdefault("NPROC", "8")
# NaN in unused slots meets NumPy in the interpreter's wgmma.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
H200 = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)


@contextlib.contextmanager
def interpreted(*, detect_races: bool = True) -> Iterator[None]:
    """Run kernels in the GPU interpreter; fail if it saw a race.

    It skips the counters by which CTAs hand over partial results (inline_mgpu); CTAs run one after the other,
    and owners wait for lower numbers only, so results stay right, but a hand-over looks like a race.
    """
    params = plgpu.InterpretGPUParams(detect_races=detect_races, inline_mgpu="ignore")
    mesh = AbstractMesh((), (), abstract_device=H200)
    with plgpu.force_gpu_interpret_mode(params), jax.sharding.use_abstract_mesh(mesh):
        yield
    if detect_races:
        assert not interpreter.get_races().races_found


def small_params(head_dim: int, *, num_sms: int) -> mosaic_gpu.Params:
    """Parameters for the interpreter: few CTAs, little shared memory."""
    tuned = mosaic_gpu.tuned_params(head_dim)
    return mosaic_gpu.Params(
        dataclasses.replace(tuned.decode, num_sms=num_sms, ctas_per_sm=1, num_stages=2),
        dataclasses.replace(tuned.prefill, num_sms=num_sms, block_kv=64, num_stages=2, is_interpreted=True),
    )


@cache
def programs(spec: Spec, num_sms: int) -> tuple[Callable[..., mosaic_gpu.Plan], Callable[..., jax.Array]]:
    """The plan and the attention, compiled apart.

    Beside other work on the CPU's threads the interpreter's callbacks can wait for ever.
    """
    make_plan = partial(
        mosaic_gpu.plan,
        num_tokens=spec.num_tokens,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        window=spec.window,
        max_query_len=max(spec.query_lens),
        params=small_params(spec.head_dim, num_sms=num_sms),
    )
    return jax.jit(make_plan), jax.jit(partial(mosaic_gpu.paged_attention, **arg_specs.make_options(spec)))


def run(spec: Spec, inputs: arg_specs.Inputs, *, num_sms: int = 2, detect_races: bool = True) -> jax.Array:
    make_plan, attend = programs(spec, num_sms)
    step_plan = jax.block_until_ready(make_plan(inputs.seq_lens, inputs.query_start_loc))
    with interpreted(detect_races=detect_races):
        return jax.block_until_ready(attend(*inputs, step_plan=step_plan))


def assert_close(spec: Spec, inputs: arg_specs.Inputs, out: jax.Array) -> None:
    tokens = int(inputs.query_start_loc[-1])
    expected = jax.jit(partial(reference.paged_attention, **arg_specs.make_options(spec)))(*inputs)
    got, expected = (np.asarray(x[:tokens].astype(jnp.float32)) for x in (out, expected))
    assert np.linalg.norm(got - expected) < 5e-3 * np.linalg.norm(expected)
    assert not np.asarray(out[tokens:].astype(jnp.float32)).any()


SLOW = ("decode, fp8, head_dim 80", "decode, head_dim 112", "decode, head_dim 256")
"""Of the small cases: what they have is in the others one by one."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
        for name in arg_specs.SMALL | arg_specs.SMALL_DECODE
    ],
)
def test_matches_the_reference(name: str) -> None:
    spec = (arg_specs.SMALL | arg_specs.SMALL_DECODE)[name]
    inputs = arg_specs.make_inputs(spec, seed=0)
    assert_close(spec, inputs, run(spec, inputs, num_sms=1))


def test_ctas_share_a_row() -> None:
    spec = Spec((1, 1), (300, 70), num_heads=5, num_kv_heads=1, head_dim=64, has_sinks=True)
    inputs = arg_specs.make_inputs(spec, seed=1)
    assert_close(spec, inputs, run(spec, inputs, num_sms=4, detect_races=False))


def test_unused_slots_change_no_bit() -> None:
    spec = Spec((1, 20), (70, 90), num_heads=2, num_kv_heads=1, window=50, padding_rows=1, padding_tokens=3)
    clean, poisoned = (arg_specs.make_inputs(spec, seed=2, unused=unused) for unused in (0.0, float("nan")))
    # What lies before the window of every query is unused as well.
    first_key = spec.seq_lens[0] - spec.window
    block = int(poisoned.block_tables[0, 0])
    poisoned = poisoned._replace(
        k_cache=poisoned.k_cache.at[block, :, :first_key].set(jnp.nan),
        v_cache=poisoned.v_cache.at[block, :, :first_key].set(jnp.nan),
    )
    a, b = (np.asarray(run(spec, x, num_sms=1).astype(jnp.float32)) for x in (clean, poisoned))
    np.testing.assert_array_equal(a, b)


def test_plan_covers_every_tile_once() -> None:
    rng, rows, kv_heads = np.random.default_rng(0), 5, 3
    params = mosaic_gpu.DecodeParams(num_sms=7, ctas_per_sm=2)
    plan_decode = jax.jit(partial(mosaic_gpu.plan_decode, num_kv_heads=kv_heads, params=params))
    for longest in (60, 700, 700, 700):
        lengths = rng.integers(1, longest, rows, dtype=np.int32)
        plan = plan_decode(lengths, np.arange(rows + 1, dtype=np.int32))
        tiles = -(-lengths // params.block_kv)
        order = [(r, h, t) for r in range(rows) for h in range(kv_heads) for t in range(tiles[r])]
        done: list[tuple[int, int, int]] = []
        for row, head, end, count, *info, share in np.asarray(plan.cta_work):
            assert list(info) == list(np.asarray(plan.row_info)[row])
            assert count <= share
            if count:
                last = order.index((row, head, end - 1))
                done += order[last - count + 1 : last + 1]
        assert done == order
        assert not np.asarray(plan.arrivals).any()


def test_unknown_devices_have_the_parameters_of_an_h200() -> None:
    for head_dim in mosaic_gpu.HEAD_DIMS:
        for is_fp8 in (False, True):
            unknown = mosaic_gpu.tuned_params(head_dim, is_fp8=is_fp8, device_kind="NVIDIA B1")
            assert unknown == mosaic_gpu.tuned_params(head_dim, is_fp8=is_fp8, device_kind="NVIDIA H200")
    assert mosaic_gpu.tuned_params(128, is_fp8=True).decode != mosaic_gpu.tuned_params(128).decode


def test_query_tiles_begin_at_swizzle_tiles() -> None:
    """The interpreter does not know that TMA drops rows otherwise."""
    query_lens, seq_lens = (1, 70, 5, 129, 64), (9, 80, 5, 1000, 64)
    starts = np.cumsum((0, *query_lens)).astype(np.int32)
    plan = mosaic_gpu.plan_prefill(
        jnp.asarray(seq_lens, jnp.int32),
        jnp.asarray(starts),
        num_tokens=272,
        num_heads=4,
        num_kv_heads=2,
        params=mosaic_gpu.tuned_params(128).prefill,
    )
    tiles = np.asarray(plan.tiles)[: int(plan.num_tiles[0])]
    covered = [token + i for _, token, low, high, _, _ in tiles for i in range(low, high)]
    assert sorted(covered) == list(range(1, starts[-1]))
    for row, token, low, _, position, seq_len in tiles:
        assert token % 8 == 0
        assert position + low == seq_len - query_lens[row] + token + low - starts[row]
    costs = tiles[:, 4] + tiles[:, 3]
    assert (np.diff(costs) <= 0).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 72}, "head_dim 72"),
        ({"block_size": 48}, "block_size 48"),
        ({"dtype": "float32"}, "float32"),
        ({"num_heads": 65, "num_kv_heads": 1}, "65 query heads"),
        ({"num_heads": 32, "num_kv_heads": 1, "head_dim": 256, "cache_dtype": "float8_e4m3fn"}, "32 query heads"),
    ],
)
def test_says_what_it_cannot_do(change: dict, words: str) -> None:
    spec = dataclasses.replace(Spec((1,), (3,)), **change)
    inputs = arg_specs.make_inputs(spec, seed=0)
    with pytest.raises(NotImplementedError, match=words):
        mosaic_gpu.paged_attention(*inputs, scale=1.0)


@pytest.mark.slow
@pytest.mark.parametrize("name", arg_specs.WIDE | arg_specs.WIDE_DECODE)
def test_wide_grid(name: str) -> None:
    spec = (arg_specs.WIDE | arg_specs.WIDE_DECODE)[name]
    inputs = arg_specs.make_inputs(spec, seed=3)
    assert_close(spec, inputs, run(spec, inputs, num_sms=3, detect_races=False))


@pytest.mark.slow
@hypothesis.settings(max_examples=10, deadline=None)
@hypothesis.given(
    decode_lens=st.lists(st.integers(1, 150), max_size=3),
    prefill_rows=st.lists(st.tuples(st.integers(2, 80), st.integers(0, 70)), max_size=2),
    num_sms=st.integers(1, 4),
    seed=st.integers(0, 2**31 - 1),
)
def test_ragged_batches(decode_lens: list[int], prefill_rows: list[tuple[int, int]], num_sms: int, seed: int) -> None:
    hypothesis.assume(decode_lens or prefill_rows)
    query_lens = (1,) * len(decode_lens) + tuple(new for new, _ in prefill_rows)
    seq_lens = (*decode_lens, *(new + cached for new, cached in prefill_rows))
    spec = Spec(query_lens, seq_lens, block_size=16, padding_rows=1, padding_tokens=1)
    inputs = arg_specs.make_inputs(spec, seed=seed)
    assert_close(spec, inputs, run(spec, inputs, num_sms=num_sms, detect_races=False))
