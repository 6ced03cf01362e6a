"""The Hopper kernels against the reference on a GPU, where the interpreter's simplifications end.

The interpreter neither runs the hand-over between CTAs nor knows the layouts that TMA and wgmma impose.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.paged_attention import arg_specs, mosaic_gpu, reference
from jaxinfer.kernels.paged_attention.arg_specs import Inputs, Spec

pytestmark = pytest.mark.device
SPECS = arg_specs.SMALL | arg_specs.SMALL_DECODE | arg_specs.WIDE | arg_specs.WIDE_DECODE


def assert_close(spec: Spec, inputs: Inputs, attend) -> None:
    assert jax.default_backend() == "gpu", "these need a Hopper GPU"
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(partial(reference.paged_attention, **arg_specs.make_options(spec)))(*inputs)
    tokens = sum(spec.query_lens)
    expected = np.asarray(expected[:tokens].astype(jnp.float32))
    for _ in range(3):  # a race would show between runs
        out = np.asarray(attend(*inputs).astype(jnp.float32))
        assert np.linalg.norm(out[:tokens] - expected) < 5e-3 * np.linalg.norm(expected)
        assert not out[tokens:].any()


@pytest.mark.parametrize("name", SPECS)
def test_matches_the_reference(name: str) -> None:
    spec = SPECS[name]
    inputs = arg_specs.make_inputs(spec, seed=3)
    assert_close(spec, inputs, jax.jit(partial(mosaic_gpu.paged_attention, **arg_specs.make_options(spec))))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_fp8_keys_in_registers(head_dim: int) -> None:
    """The interpreter cannot run these."""
    spec = dataclasses.replace(arg_specs.SMALL_DECODE["decode, fp8"], head_dim=head_dim)
    inputs = arg_specs.make_inputs(spec, seed=4)
    tuned = mosaic_gpu.tuned_params(head_dim, is_fp8=True)
    params = dataclasses.replace(tuned, decode=dataclasses.replace(tuned.decode, keys_in_registers=True))
    plan = jax.jit(
        partial(
            mosaic_gpu.plan,
            num_tokens=spec.num_tokens,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=head_dim,
            max_query_len=1,
            params=params,
        )
    )(inputs.seq_lens, inputs.query_start_loc)
    attend = jax.jit(partial(mosaic_gpu.paged_attention, **arg_specs.make_options(spec)))
    assert_close(spec, inputs, partial(attend, step_plan=plan))
