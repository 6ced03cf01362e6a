"""The Hopper kernels against the reference on a GPU, where the interpreter's simplifications end.

The interpreter neither runs the hand-over between CTAs nor knows the layouts that TMA and wgmma impose.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.paged_attention import arg_specs, mosaic_gpu, reference

pytestmark = pytest.mark.device
SPECS = arg_specs.SMALL | arg_specs.WIDE


@pytest.mark.parametrize("name", SPECS)
def test_matches_the_reference(name: str) -> None:
    assert jax.default_backend() == "gpu", "these need a Hopper GPU"
    spec = SPECS[name]
    inputs = arg_specs.make_inputs(spec, seed=3)
    options = {
        "scale": spec.head_dim**-0.5,
        "window": spec.window,
        "softcap": spec.softcap,
        "sinks": arg_specs.make_sinks(spec),
    }
    attend = jax.jit(partial(mosaic_gpu.paged_attention, **options))
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(partial(reference.paged_attention, **options))(*inputs)
    tokens = sum(spec.query_lens)
    expected = np.asarray(expected[:tokens].astype(jnp.float32))
    for _ in range(3):  # a race would show between runs
        out = np.asarray(attend(*inputs).astype(jnp.float32))
        assert np.linalg.norm(out[:tokens] - expected) < 5e-3 * np.linalg.norm(expected)
        assert not out[tokens:].any()
