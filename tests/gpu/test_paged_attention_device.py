"""The Hopper kernels against the reference on a GPU, where the interpreter's simplifications end.

The interpreter neither runs the hand-over between CTAs nor knows the layouts that TMA and wgmma impose.
"""

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.paged_attention import arg_specs, mosaic_gpu, reference
from jaxinfer.kernels.paged_attention.arg_specs import Spec

pytestmark = pytest.mark.device
# One case of each head_dim, with every kind of group and cache among them.
DECODE = {name: spec for i, (name, spec) in enumerate(arg_specs.WIDE_DECODE.items()) if i % 5 in (0, 3)}
WIDE = {name: spec for name, spec in arg_specs.WIDE.items() if not name.startswith("decode")}
REGISTERS = {
    f"fp8 keys in registers, head_dim {head_dim}": dataclasses.replace(
        arg_specs.SMALL_DECODE["decode, fp8"], head_dim=head_dim
    )
    for head_dim in (64, 96, 128)
}
"""What the interpreter cannot run."""
SPECS = arg_specs.SMALL | arg_specs.SMALL_DECODE | WIDE | DECODE | REGISTERS


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


def prepare(name: str) -> tuple[Callable[[], jax.Array], Callable[[], jax.Array]]:
    """The kernels and the reference, compiled, with their inputs."""
    spec = SPECS[name]
    inputs, options = arg_specs.make_inputs(spec, seed=3), arg_specs.make_options(spec)

    def attend(*inputs: jax.Array) -> jax.Array:
        return mosaic_gpu.paged_attention(*inputs, step_plan=make_plan(name, *inputs[4:]), **options)

    with jax.default_matmul_precision("highest"):
        expect = jax.jit(partial(reference.paged_attention, **options)).lower(*inputs).compile()
    return partial(jax.jit(attend).lower(*inputs).compile(), *inputs), partial(expect, *inputs)


@cache
def prepared() -> dict[str, Future]:
    """All cases at once: compiling takes most of the time."""
    pool = ThreadPoolExecutor()
    return {name: pool.submit(prepare, name) for name in SPECS}


@pytest.mark.parametrize("name", SPECS)
def test_matches_the_reference(name: str) -> None:
    assert jax.default_backend() == "gpu", "these need a Hopper GPU"
    spec: Spec = SPECS[name]
    attend, expect = prepared()[name].result()
    tokens = sum(spec.query_lens)
    expected = np.asarray(expect()[:tokens].astype(jnp.float32))
    for _ in range(3):  # a race would show between runs
        out = np.asarray(attend().astype(jnp.float32))
        assert np.linalg.norm(out[:tokens] - expected) < 5e-3 * np.linalg.norm(expected)
        assert not out[tokens:].any()
