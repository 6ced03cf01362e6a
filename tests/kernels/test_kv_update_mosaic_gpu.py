"""Hopper's KV writes in the GPU interpreter, against the reference operation by operation.

Under `jit` XLA may leave out the roundings between norm, weight and rotation; the kernel keeps them. What is left is
whether a product and a sum are rounded once or twice, which shows in a few elements' last bit.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractDevice, AbstractMesh

from jaxinfer.kernels.kv_update import api, mosaic_gpu

H200 = AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132)
FP8 = jnp.float8_e4m3fn
BLOCKS = 6


class Case(NamedTuple):
    """A model's heads, a step's tokens, of which `padding` have slot 0."""

    kv_heads: int = 2
    group: int = 2
    head_dim: int = 64
    tokens: int = 5
    padding: int = 2
    block_size: int = 16
    dtype: Any = jnp.bfloat16
    cache_dtype: Any = None
    has_norm: bool = True
    scale: float | None = None


@contextlib.contextmanager
def interpreted() -> Iterator[None]:
    """Run kernels in the GPU interpreter; fail if it saw a race."""
    mesh = AbstractMesh((), (), abstract_device=H200)
    params = plgpu.InterpretGPUParams(detect_races=True)
    with plgpu.force_gpu_interpret_mode(params), jax.sharding.use_abstract_mesh(mesh):
        yield
    assert not interpreter.get_races().races_found


def make(case: Case, *, seed: int = 0, unused: float = np.nan) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """The arrays of `rope_kv_update` and its options. Slots come from everywhere but the null block."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32), case.dtype)

    angles = rng.standard_normal((case.tokens, case.head_dim // 2)).astype(np.float32) * 3
    taken = rng.permutation(np.arange(case.block_size, BLOCKS * case.block_size))[: case.tokens - case.padding]
    slots = np.concatenate([taken, np.zeros(case.padding)]).astype(np.int32)
    cache = jnp.full((BLOCKS, case.kv_heads, case.block_size, case.head_dim), unused, case.cache_dtype or case.dtype)
    arrays = {
        "qkv": normal(case.tokens, case.kv_heads, case.group + 2, case.head_dim),
        "k_cache": cache,
        "v_cache": cache,
        "cos": jnp.cos(angles),
        "sin": jnp.sin(angles),
        "slot_mapping": jnp.asarray(slots),
    }
    options: dict[str, Any] = {}
    if case.has_norm:
        options |= {"q_norm": normal(case.head_dim), "k_norm": normal(case.head_dim), "eps": 1e-5}
    if case.scale is not None:
        options |= {"k_scale": jnp.float32(case.scale), "v_scale": jnp.float32(case.scale / 2)}
    return arrays, options


def check(case: Case, *, seed: int = 0) -> None:
    """Both forms. What is only copied is the same to the bit, and so is every other slot, NaN included."""
    arrays, options = make(case, seed=seed)
    with interpreted():
        got = jax.block_until_ready(api.rope_kv_update(**arrays, **options, implementation="mosaic_gpu"))
    with jax.disable_jit():
        want = api.rope_kv_update(**arrays, **options)
    assert_close(got[0], want[0])
    assert_close(written(got[1], case), written(want[1], case))
    assert_same(got[2], want[2])

    scales = {name: value for name, value in options.items() if name.endswith("scale")}
    k, v = arrays["qkv"][:, :, -2], arrays["qkv"][:, :, -1]
    rows = (arrays["k_cache"], arrays["v_cache"], k, v, arrays["slot_mapping"])
    with interpreted():
        got = jax.block_until_ready(api.kv_update(*rows, **scales, implementation="mosaic_gpu"))
    for a, b in zip(got, api.kv_update(*rows, **scales), strict=True):
        assert_same(a, b)


def written(cache: jax.Array, case: Case) -> np.ndarray:
    """A cache without the null block's first slot, which holds any of the padding rows or what it held."""
    return np.asarray(cache.swapaxes(1, 2).reshape(BLOCKS * case.block_size, -1)[1:])


def assert_close(got: Any, want: Any) -> None:
    """Within one step of the dtype, and nearly everywhere the same."""
    got, want = np.asarray(got), np.asarray(want)
    step = float(jnp.finfo(got.dtype).eps)
    got, want = got.astype(np.float32), want.astype(np.float32)
    np.testing.assert_allclose(got, want, rtol=1.01 * step, atol=1e-6)
    assert np.sum((got != want) & ~np.isnan(want)) <= 2 + got.size // 200


def assert_same(got: jax.Array, want: jax.Array) -> None:
    got, want = (np.asarray(x.at[0, :, 0].set(0)) for x in (got, want))
    np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(kv_heads=3, group=3, head_dim=80, has_norm=False, padding=0),
        Case(kv_heads=1, group=4, head_dim=256, dtype=jnp.float16),
        Case(cache_dtype=FP8, has_norm=False),
        Case(kv_heads=1, group=1, head_dim=96, cache_dtype=FP8, scale=0.01),
    ],
    ids=str,
)
def test_matches_the_reference(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 192, 256])
@pytest.mark.parametrize("cache_dtype", [None, FP8])
def test_head_dims(head_dim: int, cache_dtype: Any) -> None:
    check(Case(kv_heads=4, group=4, head_dim=head_dim, cache_dtype=cache_dtype, tokens=7, scale=cache_dtype and 0.3))


def test_heads_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token with more heads than registers hold is cut at its KV heads."""
    monkeypatch.setattr(mosaic_gpu, "MAX_ELEMENTS", 4)
    check(Case(kv_heads=4, head_dim=128, tokens=3))


@hypothesis.settings(max_examples=4, deadline=None, derandomize=True)
@hypothesis.given(
    kv_heads=st.integers(1, 8),
    group=st.integers(1, 5),
    head_dim=st.sampled_from([64, 80, 112, 128]),
    tokens=st.integers(1, 8),
    block_size=st.sampled_from([16, 24]),
    has_norm=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_any_heads(seed: int, tokens: int, **sizes: Any) -> None:
    check(Case(**sizes, tokens=tokens, padding=tokens // 3), seed=seed)


@pytest.mark.parametrize("shape", [(8, 128), (1, 64), (3, 40), (8, 4, 64), (5, 3, 56), (1, 1, 128), (32, 1, 96)])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_layouts_hold_every_element(shape: tuple[int, ...], itemsize: int) -> None:
    """Threads x registers x vector cover the array, as often as the layout says; accesses are 16 bytes at most."""
    layout = mosaic_gpu._layout(shape, itemsize).to_mgpu()
    vector = layout.vector_length
    assert vector * itemsize <= 16
    held = 128 * int(np.prod(layout.registers_shape(shape))) * vector
    assert held == int(np.prod(shape)) * layout.replication_factor


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"head_dim": 72}, "head_dim 72"),
        ({"head_dim": 288}, "head_dim 288"),
        ({"dtype": jnp.float32}, "rows of float32"),
        ({"cache_dtype": jnp.float16}, "a cache of float16"),
    ],
)
def test_says_what_it_cannot_do(change: dict[str, Any], words: str) -> None:
    arrays, options = jax.eval_shape(lambda: make(Case(**change)))
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(lambda: api.rope_kv_update(**arrays, **options, implementation="mosaic_gpu"))
