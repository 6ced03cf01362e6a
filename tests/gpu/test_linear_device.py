"""The Hopper kernel against the reference on a GPU, where the interpreter's simplifications end.

The interpreter does not run the exchange through other CTAs' shared memory.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.linear import arg_specs, linear, mosaic_gpu
from jaxinfer.kernels.linear.tuning import ManyRowsParams, Params, Product, tuned_params

pytestmark = pytest.mark.device


SPECS = {
    "0.6B qkv, 16 rows": None,
    "0.6B out, 32 rows": None,
    "0.6B gate_up, 16 rows": None,
    "0.6B down, 16 rows": None,
    "8B down, 16 rows": Params(splits=2, num_stages=20),
    "0.6B qkv, 64 rows": None,
    "8B out, 128 rows": Params(splits=2, num_stages=7),
    "half 8B down, 128 rows": None,
    "0.6B gate_up, 64 rows": Params(splits=4, num_stages=4),
    "0.6B out, 256 rows": None,
    "0.6B gate_up, 192 rows": None,
    "8B qkv, 64 rows": None,
    "8B qkv, 128 rows": None,
    "8B gate_up, 128 rows": None,
    "8B gate_up, 192 rows": None,
    "8B out, 256 rows": None,
    "8B down, 64 rows": None,
    "8B down, 192 rows": None,
    "8B out, 64 rows": ManyRowsParams(block_n=64, splits=2, block_k=128),
    "0.6B gate_up, 128 rows": ManyRowsParams(block_n=128, splits=2, num_stages=7),
    "half 8B gate_up, 256 rows": ManyRowsParams(block_n=96, splits=1, num_stages=5),
    "8B gate_up, 256 rows": ManyRowsParams.filling(192, 1, 128, rows=256, shares_x=True),
    "half 8B gate_up, 128 rows": ManyRowsParams.filling(96, 1, 64, rows=128, shares_x=True),
    "half 8B qkv, 256 rows": ManyRowsParams(block_n=128, splits=4, num_stages=4, consumer_rows=128),
}
"""Products by name, with tuned parameters or others."""


@pytest.mark.parametrize("name", SPECS)
def test_matches_the_reference(name: str) -> None:
    assert jax.default_backend() == "gpu", "these need a Hopper GPU"
    spec = arg_specs.BENCHMARKS[name]
    product = spec.product
    params = SPECS[name] or tuned_params(product)
    assert params is not None

    @jax.jit
    def multiply(x: jax.Array, weight: jax.Array, options: dict[str, jax.Array]) -> jax.Array:
        x, weight = x.reshape(spec.rows, -1), weight.reshape(product.size, product.segments, product.columns)
        return mosaic_gpu.linear(x, weight, **options, activation=spec.activation, params=params)

    for seed in range(3):  # a race would show between runs
        x, weight, options = arg_specs.make_inputs(spec, seed)
        wide = jax.tree.map(lambda a: a.astype(jnp.float32), (x, weight, options))
        expected = linear(wide[0], wide[1], activation=spec.activation, **wide[2])
        expected = np.asarray(expected).reshape(spec.rows, -1)
        out = np.asarray(multiply(x, weight, options).astype(jnp.float32))
        assert np.linalg.norm(out - expected) < 6e-3 * np.linalg.norm(expected)


def test_a_chain_of_launches_keeps_their_order() -> None:
    """Each product reads what the one before wrote."""
    specs = list(arg_specs.layer(arg_specs.MODELS["0.6B"], 16).values())[1::2]
    weights, params = [], []
    for seed, spec in enumerate(specs):
        _, weight, options = arg_specs.make_inputs(spec, seed)
        weights.append(0.1 * weight.reshape(-1, 1, spec.outputs[0]))
        tuned = tuned_params(Product(spec.rows, weights[-1].shape[0], 1, spec.outputs[0]))
        assert tuned is not None
        params.append(tuned)
    x = options["residual"]

    def chain(x: jax.Array, weights: list[jax.Array], *, by_kernel: bool) -> jax.Array:
        for i in range(24):
            weight = weights[i % 2]
            rows = jnp.tile(x, (1, weight.shape[0] // x.shape[1]))
            if by_kernel:
                x = mosaic_gpu.linear(rows, weight, residual=x, params=params[i % 2])
            else:
                x = linear(rows, weight[:, 0], residual=x)
        return x

    chain = jax.jit(chain, static_argnames="by_kernel")
    expected, first = (np.asarray(chain(x, weights, by_kernel=b).astype(jnp.float32)) for b in (False, True))
    assert np.linalg.norm(first - expected) < 2e-2 * np.linalg.norm(expected)
    for _ in range(20):
        np.testing.assert_array_equal(np.asarray(chain(x, weights, by_kernel=True).astype(jnp.float32)), first)
