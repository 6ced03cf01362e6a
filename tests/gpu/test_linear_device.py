"""The Hopper kernel against the reference on a GPU, where the interpreter's simplifications end.

The interpreter runs neither the exchange through other CTAs' shared memory nor launches that overlap.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.linear import arg_specs, linear

pytestmark = pytest.mark.device


@pytest.mark.parametrize("name", arg_specs.BENCHMARKS)
def test_matches_the_reference(name: str) -> None:
    assert jax.default_backend() == "gpu", "these need a Hopper GPU"
    spec = arg_specs.BENCHMARKS[name]
    multiply = jax.jit(partial(linear, activation=spec.activation, implementation="mosaic_gpu"))
    for seed in range(3):  # a race would show between runs
        x, weight, options = arg_specs.make_inputs(spec, seed)
        wide = jax.tree.map(lambda a: a.astype(jnp.float32), (x, weight, options))
        expected = np.asarray(linear(wide[0], wide[1], activation=spec.activation, **wide[2]))
        out = np.asarray(multiply(x, weight, **options).astype(jnp.float32))
        assert np.linalg.norm(out - expected) < 6e-3 * np.linalg.norm(expected)


def test_a_chain_of_launches_keeps_their_order() -> None:
    """Each product reads what the one before wrote, while both run."""
    specs = list(arg_specs.layer(arg_specs.MODELS["0.6B"], 16).values())[1::2]
    inputs = [arg_specs.make_inputs(spec, seed) for seed, spec in enumerate(specs)]
    weights = [0.1 * weight for _, weight, _ in inputs]  # the kernel wants arguments of the program

    def chain(x: jax.Array, weights: list[jax.Array], implementation: str) -> jax.Array:
        total = x
        for i in range(24):
            spec, weight = specs[i % 2], weights[i % 2]
            rows = jnp.tile(total, (1, np.prod(spec.inputs) // total.shape[1])).reshape(spec.rows, *spec.inputs)
            total = linear(rows, weight, residual=total, implementation=implementation)
        return total

    chain = jax.jit(chain, static_argnames="implementation")
    x = inputs[0][2]["residual"]
    expected, first = (np.asarray(chain(x, weights, name).astype(jnp.float32)) for name in ("reference", "mosaic_gpu"))
    assert np.linalg.norm(first - expected) < 2e-2 * np.linalg.norm(expected)
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(chain(x, weights, "mosaic_gpu").astype(jnp.float32)), first)
