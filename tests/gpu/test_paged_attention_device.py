"""The Hopper kernels against exact attention on a GPU, where the interpreter's simplifications end.

The interpreter neither runs the hand-over between CTAs, nor a step's two products at once, nor knows the layouts that
TMA and wgmma impose.
"""

import dataclasses
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.paged_attention import arg_specs, mosaic_gpu
from jaxinfer.kernels.paged_attention.arg_specs import Inputs, Spec

pytestmark = pytest.mark.device
# One case of each head_dim, with every kind of group and cache among them.
DECODE = {name: spec for i, (name, spec) in enumerate(arg_specs.WIDE_DECODE.items()) if i % 5 in (0, 3)}
WIDE = {name: spec for name, spec in arg_specs.WIDE.items() if not name.startswith("decode")}
PREFILL = {
    f"prefill, head_dim {head_dim}{', fp8' if cache else ''}": Spec(
        (1, 150, 300, 5, 64),
        (90, 1000, 300, 700, 64),
        num_heads=heads,
        num_kv_heads=2,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        softcap=softcap,
        padding_rows=1,
        padding_tokens=9,
        **cache,
    )
    for head_dim, block_size, heads, window, softcap, cache in (
        (64, 16, 6, 100, None, arg_specs.FP8),
        (80, 64, 8, None, None, {}),
        (80, 128, 8, None, None, arg_specs.FP8),
        (96, 32, 8, 100, None, arg_specs.FP8),
        (112, 64, 6, None, 5.0, {}),
        (128, 64, 8, None, None, arg_specs.FP8),
        (128, 16, 2, 300, 5.0, {}),
        (256, 64, 8, None, None, {}),
        (256, 64, 8, 100, None, arg_specs.FP8),
    )
}
"""Several K and V tiles a row: the loop over keys."""
REGISTERS = {
    f"fp8 keys in registers, head_dim {head_dim}": dataclasses.replace(
        arg_specs.SMALL_DECODE["decode, fp8"], head_dim=head_dim
    )
    for head_dim in (64, 96, 128)
}
"""What the interpreter cannot run."""
SPECS = arg_specs.SMALL | arg_specs.SMALL_DECODE | WIDE | DECODE | PREFILL | REGISTERS


def make_plan(name: str, seq_lens: jax.Array, query_start_loc: jax.Array) -> mosaic_gpu.Plan:
    spec = SPECS[name]
    params = mosaic_gpu.tuned_params(spec.head_dim, is_fp8=spec.kv_dtype.itemsize == 1)
    if name in REGISTERS:
        params = dataclasses.replace(params, decode=dataclasses.replace(params.decode, keys_in_registers=True))
    return mosaic_gpu.plan(
        seq_lens,
        query_start_loc,
        num_tokens=spec.num_tokens,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        window=spec.window,
        max_query_len=max(spec.query_lens),
        params=params,
    )


def exact_attention(spec: Spec, inputs: Inputs) -> np.ndarray:
    """float64 [tokens, H, D]."""
    options = arg_specs.make_options(spec)
    scales = {name: float(options.get(name, 1.0)) for name in ("k_scale", "v_scale")}
    queries, k_cache, v_cache = (np.asarray(x.astype(jnp.float32), np.float64) for x in inputs[:3])
    rows, start = [], 0
    for table, new, length in zip(np.asarray(inputs.block_tables), spec.query_lens, spec.seq_lens, strict=False):
        pages = (x[table].swapaxes(0, 1).reshape(spec.num_kv_heads, -1, spec.head_dim) for x in (k_cache, v_cache))
        keys, values = (x[:, :length].repeat(spec.num_heads // spec.num_kv_heads, 0) for x in pages)
        scores = np.einsum("qhd,hkd->hqk", queries[start : start + new], keys) * options["scale"] * scales["k_scale"]
        if spec.softcap is not None:
            scores = spec.softcap * np.tanh(scores / spec.softcap)
        distance = (length - new + np.arange(new))[:, None] - np.arange(length)
        scores[:, (distance < 0) | (distance >= (spec.window or length))] = -np.inf
        sinks = np.full(spec.num_heads, -np.inf) if options["sinks"] is None else np.asarray(options["sinks"])
        maximum = np.maximum(scores.max(-1), sinks[:, None])[..., None]
        weights = np.exp(scores - maximum)
        total = weights.sum(-1, keepdims=True) + np.exp(sinks[:, None, None] - maximum)
        rows.append(np.einsum("hqk,hkd->qhd", weights / total, values) * scales["v_scale"])
        start += new
    return np.concatenate(rows)


def prepare(name: str) -> tuple[Callable[[], jax.Array], np.ndarray]:
    """The kernels, compiled, with their inputs, and what is expected."""
    spec = SPECS[name]
    inputs, options = arg_specs.make_inputs(spec, seed=3), arg_specs.make_options(spec)

    def attend(*inputs: jax.Array) -> jax.Array:
        return mosaic_gpu.paged_attention(*inputs, step_plan=make_plan(name, *inputs[4:]), **options)

    program = jax.jit(attend).lower(*inputs).compile()
    return partial(program, *inputs), exact_attention(spec, inputs)


@cache
def prepared() -> dict[str, Future]:
    """All cases at once, since compiling takes most of the time; but none in a process among several (xdist)."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        return {}
    pool = ThreadPoolExecutor()
    return {name: pool.submit(prepare, name) for name in SPECS}


@pytest.mark.parametrize("name", SPECS)
def test_matches_exact_attention(name: str) -> None:
    assert jax.default_backend() == "gpu", "these need a Hopper GPU"
    attend, expected = prepared()[name].result() if prepared() else prepare(name)
    for _ in range(3):  # a race would show between runs
        out = np.asarray(attend().astype(jnp.float32))
        tokens = len(expected)
        assert np.linalg.norm(out[:tokens] - expected) < 5e-3 * np.linalg.norm(expected)
        assert not out[tokens:].any()
