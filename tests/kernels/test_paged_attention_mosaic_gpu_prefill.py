"""The Hopper prefill kernel: its work list, and its results in the GPU interpreter against the reference."""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.kernels.paged_attention import arg_specs, reference
from jaxinfer.kernels.paged_attention.arg_specs import Spec
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill import (
    PrefillParams,
    PrefillPlan,
    check_prefill_supported,
    plan_prefill,
    prefill_attention,
)
from jaxinfer.kernels.paged_attention.mosaic_gpu_prefill_items import Item, ItemList

# The interpreter's threads wait for each other in callbacks, which run in XLA's pool. It has a thread a core, read when
# the backend starts: on two cores, two waiting threads of a kernel keep the third from ever going on.
os.environ.setdefault("NPROC", "8")
# NaN in unused slots meets NumPy in the interpreter's wgmma.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
H200 = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
FP8 = "float8_e4m3fn"


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run kernels in the GPU interpreter; fail if it saw a race."""
    params = plgpu.InterpretGPUParams(detect_races=True)
    mesh = AbstractMesh((), (), abstract_device=H200)
    with plgpu.force_gpu_interpret_mode(params), jax.sharding.use_abstract_mesh(mesh):
        yield
    assert not interpreter.get_races().races_found


def make_plan(spec: Spec, params: PrefillParams) -> PrefillPlan:
    starts = np.cumsum((0, *spec.query_lens, *(0,) * spec.padding_rows), dtype=np.int32)
    build = partial(
        plan_prefill,
        num_tokens=spec.num_tokens,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        window=spec.window,
        params=params,
    )
    seq_lens = jnp.asarray((*spec.seq_lens, *(0,) * spec.padding_rows), jnp.int32)
    return jax.block_until_ready(jax.jit(build)(seq_lens, jnp.asarray(starts)))


def items_of(spec: Spec, params: PrefillParams) -> tuple[np.ndarray, Item]:
    """All items in order: rows [n], and an Item of arrays [n]."""
    plan = make_plan(spec, params)
    group = spec.num_heads // spec.num_kv_heads
    items = ItemList(plan.tiles, plan.sections, plan.num_tiles, spec.num_heads, group, spec.window, params)
    rows, item = jax.jit(jax.vmap(items.read))(jnp.arange(int(items.total), dtype=jnp.int32))
    return np.asarray(rows), jax.tree.map(np.asarray, item)


RAGGED = Spec(
    (1, 1, 70, 5, 300, 64, 129), (9, 20, 80, 700, 300, 4000, 129), num_heads=12, num_kv_heads=3, padding_rows=2
)


@pytest.mark.parametrize("section_keys", [1, 1000, 3000, 10**6])
@pytest.mark.parametrize(("num_heads", "cluster"), [(12, 1), (12, 2), (6, 2), (9, 1)])
def test_items_cover_every_token_and_head_once(section_keys: int, num_heads: int, cluster: int) -> None:
    spec = dataclasses.replace(RAGGED, num_heads=num_heads)
    params = PrefillParams(section_keys=section_keys, cluster=cluster)
    group = num_heads // spec.num_kv_heads
    starts = np.cumsum((0, *spec.query_lens))
    rows, items = items_of(spec, params)
    seen = np.zeros((spec.num_tokens, num_heads), int)
    for i, row in enumerate(rows):
        token, low, high, head = (int(x[i]) for x in (items.token, items.low, items.high, items.head))
        assert token % 8 == 0
        assert starts[row] <= token + low < token + high <= starts[row + 1]
        assert items.position[i] == spec.seq_lens[row] - spec.query_lens[row] + token - starts[row]
        assert items.seq_len[i] == spec.seq_lens[row]
        assert items.end_step[i] == -(-(items.position[i] + high) // params.block_kv)
        heads = params.heads_per_item(group)
        assert head // group == (head + heads - 1) // group
        seen[token + low : token + high, head : head + heads] += 1
    assert (seen[: starts[2]] == 0).all()  # the decode rows
    assert (seen[starts[2] :] == 1).all()


@pytest.mark.parametrize("section_keys", [1000, 3000])
def test_a_section_fits_the_cache_and_begins_with_its_longest_tiles(section_keys: int) -> None:
    """While a section is worked on, a few (row, KV head) pairs are read, and their keys are few enough."""
    spec = Spec((100,) * 6, (700, 400, 900, 300, 2000, 100), num_heads=12, num_kv_heads=3)
    plan = make_plan(spec, PrefillParams(section_keys=section_keys))
    num_tiles = int(plan.num_tiles[0])
    tiles, sections = np.asarray(plan.tiles)[:num_tiles], np.asarray(plan.sections)[:num_tiles]
    for first, count, kv_heads in np.unique(sections, axis=0):
        part = tiles[first : first + count]
        assert (sections[first : first + count] == (first, count, kv_heads)).all()
        keys = sum(spec.seq_lens[row] for row in set(part[:, 0]))
        assert keys * kv_heads <= section_keys or kv_heads == 1
        assert (np.diff(part[:, 4] + part[:, 3]) <= 0).all()
    assert len(np.unique(sections[:, 0])) > 1


def run(spec: Spec, params: PrefillParams, *, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(the kernel's output, the reference's, what the kernel left of the output it was given) of the prefill rows."""
    inputs = arg_specs.make_inputs(spec, seed=seed)
    options = {
        "scale": spec.head_dim**-0.5,
        "softcap": spec.softcap,
        "sinks": arg_specs.make_sinks(spec),
        "k_scale": jnp.float32(0.7) if spec.has_scales else None,
        "v_scale": jnp.float32(1.9) if spec.has_scales else None,
    }
    plan = make_plan(spec, dataclasses.replace(params, is_interpreted=True))
    attend = jax.jit(partial(prefill_attention, **options))
    with interpreted():
        out = jax.block_until_ready(attend(*inputs[:4], plan, jnp.full_like(inputs.q, 7)))
    expected = jax.jit(partial(reference.paged_attention, window=spec.window, **options))(*inputs)
    out, expected = (np.asarray(x.astype(jnp.float32)) for x in (out, expected))
    tokens = sum(spec.query_lens)
    return out[:tokens], expected[:tokens], out[tokens:]


@pytest.mark.parametrize(
    ("spec", "params"),
    [
        (
            Spec((20, 30), (90, 30), num_heads=2, num_kv_heads=1, head_dim=80, padding_tokens=2),
            PrefillParams(num_sms=2, block_kv=64),
        ),
        (
            Spec((70,), (200,), num_heads=3, num_kv_heads=1, block_size=16, window=60, padding_rows=1),
            PrefillParams(num_sms=1, block_kv=64, q_buffers=1, take_turns=False),
        ),
        pytest.param(
            Spec(
                (20, 9),
                (90, 100),
                num_heads=2,
                num_kv_heads=1,
                head_dim=112,
                window=40,
                softcap=5.0,
                has_sinks=True,
                cache_dtype=FP8,
                has_scales=True,
            ),
            PrefillParams(num_sms=2, block_kv=64),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Spec((40,), (300,), num_heads=4, num_kv_heads=2, head_dim=128, block_size=256, cache_dtype=FP8),
            PrefillParams(num_sms=1, block_kv=128, section_keys=300),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Spec((20, 30), (90, 30), num_heads=2, num_kv_heads=1, head_dim=256, dtype="float16"),
            PrefillParams(num_sms=2, block_kv=64, q_buffers=1),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda x: f"{x.head_dim}-{x.cache_dtype}" if isinstance(x, Spec) else "",
)
def test_matches_the_reference(spec: Spec, params: PrefillParams) -> None:
    out, expected, rest = run(spec, params)
    assert np.linalg.norm(out - expected) < 5e-3 * np.linalg.norm(expected)
    assert (rest == 7).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 72}, "head_dim 72"),
        ({"block_size": 48}, "block_size 48"),
        ({"q_dtype": jnp.float32}, "float32"),
        ({"cache_dtype": jnp.float8_e5m2}, "float8_e5m2"),
    ],
)
def test_says_what_it_cannot_do(change: dict, words: str) -> None:
    layer = {"q_dtype": jnp.bfloat16, "cache_dtype": jnp.bfloat16, "group": 4, "head_dim": 128, "block_size": 64}
    with pytest.raises(NotImplementedError, match=words):
        check_prefill_supported(**(layer | change), has_scales=False, params=PrefillParams())
