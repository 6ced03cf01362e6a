"""The specification of `linear` against the operations that it stands for, and what its api refuses."""

import dataclasses
import itertools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.kernels.linear import arg_specs, choose, choose_for, linear, tuning
from jaxinfer.kernels.linear.arg_specs import Spec
from jaxinfer.kernels.linear.reference import MANY_ROWS
from jaxinfer.kernels.linear.tuning import (
    FEWEST_OF_MANY_ROWS,
    PRODUCER_REGISTERS,
    ManyRowsParams,
    Params,
    Product,
    default_params,
    tuned_params,
)


def in_float64(spec: Spec, x: jax.Array, weight: jax.Array, options: dict) -> np.ndarray:
    values = {name: np.asarray(value, np.float64) for name, value in options.items()}
    x = np.asarray(x, np.float64).reshape(spec.rows, -1)
    if spec.has_norm:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * values["norm_weight"]
    out = x @ np.asarray(weight, np.float64).reshape(x.shape[1], -1)
    out = out.reshape(spec.rows, *spec.outputs)
    if spec.has_bias:
        out = out + values["bias"][None]
    if spec.activation:
        out = out[:, 0] / (1 + np.exp(-out[:, 0])) * out[:, 1]
    return out + values["residual"] if spec.has_residual else out


@pytest.mark.parametrize(
    "spec",
    [
        Spec(3, (8,), (2, 3, 4), has_norm=True, has_bias=True, dtype="float32"),
        Spec(3, (2, 3, 4), (5,), has_residual=True, dtype="float32"),
        Spec(3, (8,), (2, 6), has_norm=True, has_bias=True, has_residual=True, activation="silu", dtype="float32"),
    ],
    ids=["qkv", "out", "gate_up"],
)
def test_is_what_it_says(spec: Spec) -> None:
    x, weight, options = arg_specs.make_inputs(spec, seed=0)
    out = linear(x, weight, activation=spec.activation, **options)
    assert out.shape == spec.result
    np.testing.assert_allclose(out, in_float64(spec, x, weight, options), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("rows", [MANY_ROWS - 1, MANY_ROWS])
def test_sums_are_rounded_once(rows: int) -> None:
    """Few rows or many: 8,192 terms in bf16 are as near as bf16 can be, half a unit in its last place."""
    x, weight, _ = arg_specs.make_inputs(Spec(rows, (8192,), (64,)), seed=0)
    exact = np.asarray(x, np.float64) @ np.asarray(weight, np.float64)
    out = linear(x, weight)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_less(np.abs(np.asarray(out, np.float64) - exact), 2**-8 * np.abs(exact) + 1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"x": (3, 7)}, "does not fit weight"),
        ({"bias": (4, 8)}, r"bias \(4, 8\) should be \(8, 4\)"),
        ({"residual": (2, 8, 4)}, "residual"),
        ({"norm_weight": (6,)}, "norm_weight"),
        ({"activation": "gelu"}, "'gelu'"),
        ({"activation": "silu"}, "outputs"),
    ],
    ids=str,
)
def test_says_what_does_not_fit(change: dict, words: str) -> None:
    arguments = {"x": (3, 8), "weight": (8, 8, 4)} | change
    arrays = {name: jnp.zeros(x) if isinstance(x, tuple) else x for name, x in arguments.items()}
    with pytest.raises(ValueError, match=words):
        linear(**arrays)


def test_chooses_the_kernel_where_it_is_known_to_win() -> None:
    assert choose("gpu", compute_capability="9.0") == "mosaic_gpu"
    assert choose("gpu", compute_capability="8.0") == choose("tpu", compute_capability="") == "reference"
    shape = jax.ShapeDtypeStruct
    weight = shape((1024, 8, 4, 128), jnp.bfloat16)
    for rows, dtype, implementation, expected in (
        (16, jnp.bfloat16, "mosaic_gpu", "mosaic_gpu"),
        (16, jnp.bfloat16, "reference", "reference"),
        (16, jnp.float32, "mosaic_gpu", "reference"),
        (17, jnp.bfloat16, "mosaic_gpu", "reference"),
        (4096, jnp.bfloat16, "mosaic_gpu", "reference"),
    ):
        assert choose_for(implementation, shape((rows, 1024), dtype), weight, has_norm=True) == expected
    assert choose_for("mosaic_gpu", shape((16, 1000), jnp.bfloat16), shape((1000, 24), jnp.bfloat16)) == "reference"


def test_parameters_fit_their_products() -> None:
    """Those of every entry, at every number of rows, with a norm before and without."""
    products = {dataclasses.replace(spec.product, rows=0, has_norm=False) for spec in arg_specs.BENCHMARKS.values()}
    tuned = set()
    for product, rows, has_norm in itertools.product(products, range(1, 513), (False, True)):
        params = tuned_params(dataclasses.replace(product, rows=rows, has_norm=has_norm))
        if params is not None:
            product = dataclasses.replace(product, rows=rows, has_norm=has_norm)
            params.check(product)
            tuned.add(product.name)
    entries = json.loads((pathlib.Path(tuning.__file__).parent / "tuned" / "nvidia_h200.json").read_text())
    heads = {
        name: found for name in entries if (found := re.fullmatch(r"(\d+)x1x(\d+)( of norm)? in heads of (\d+)", name))
    }
    for name, found in heads.items():
        size, columns, head_dim = (int(found[i]) for i in (1, 2, 4))
        for rows, fields in entries[name].items():
            params = Params(**fields)
            assert params.block_n == head_dim
            assert not params.norm_apart
            params.check(Product(int(rows), size, 1, columns, has_norm=found[3] is not None))
    assert set(entries) - set(heads) <= tuned
    assert tuned_params(Product(16, 2048, 1, 1024), device_kind="some other card") is None


@pytest.mark.parametrize("name", arg_specs.BENCHMARKS)
def test_default_parameters_fit(name: str) -> None:
    product = arg_specs.BENCHMARKS[name].product
    params = default_params(product)
    params.check(product)
    if product.rows >= FEWEST_OF_MANY_ROWS:  # one wave
        cluster = params.splits * product.segments
        assert product.columns // params.block_n * cluster <= (132 if cluster <= 2 else 104)


def test_a_norm_is_apart_where_only_the_product_was_measured() -> None:
    product = Product(16, 2048, 1, 1024)
    alone, normed = tuned_params(product), tuned_params(dataclasses.replace(product, has_norm=True))
    assert isinstance(alone, Params)
    assert normed == dataclasses.replace(alone, norm_apart=True)
    assert tuned_params(dataclasses.replace(product, has_norm=True), head_dim=128) is None
    of_norm = tuned_params(Product(16, 1024, 1, 4096, has_norm=True))
    assert of_norm is not None
    assert not of_norm.norm_apart
    assert tuned_params(Product(16, 1024, 1, 4096)) is None


def test_parameters_serve_down_to_half_of_the_rows_they_were_measured_at(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = {"block_n": 64, "splits": 2, "num_stages": 8}, {"block_n": 64, "consumer_rows": 64, "num_stages": 7}
    table = {
        "6144x1x4096": {"128": few},
        "1024x1x4096 of norm": {"16": few, "64": few, "128": many | {"consumer_rows": 128}, "192": many},
    }
    monkeypatch.setattr(tuning, "_tuned", lambda device_kind: table if device_kind == "a card" else {})

    def found(size: int, columns: int, *, has_norm: bool = False) -> dict[int, tuple[int, bool]]:
        """By number of rows, stages and whether the kernel is that for many rows."""
        products = {rows: Product(rows, size, 1, columns, has_norm) for rows in range(8, 513, 8)}
        every = {rows: tuned_params(product, device_kind="a card") for rows, product in products.items()}
        return {rows: (p.num_stages, isinstance(p, ManyRowsParams)) for rows, p in every.items() if p is not None}

    at_128 = dict.fromkeys((80, 96, 112, 128), (8, False))
    assert found(6144, 4096) == at_128
    assert found(6144, 4096, has_norm=True) == at_128  # with the norm apart
    # The kernel for many rows does multiples of its consumers' rows.
    assert found(1024, 4096, has_norm=True) == dict.fromkeys((16, 48, 64), (8, False)) | {
        128: (7, True),
        192: (7, True),
    }
    assert found(1024, 4096) == {}


def test_no_consumer_asks_for_registers_that_were_not_launched() -> None:
    """An SM would wait for them for ever: a CTA has what all of its warpgroups were launched with, in eights each."""
    asked = 0
    for rows, consumer_rows in itertools.product(range(64, 257, 64), (64, 128)):
        consumers = rows // consumer_rows
        if rows % consumer_rows:
            continue
        params, asked = ManyRowsParams(consumer_rows=consumer_rows), asked + 1
        registers = params.consumer_registers(rows)
        launched = params.launched_registers(rows)
        assert launched * (consumers + 1) <= 512
        assert registers % 8 == launched % 8 == 0
        assert registers * consumers + PRODUCER_REGISTERS <= launched * (consumers + 1)
        assert PRODUCER_REGISTERS < launched <= registers or consumers == 1
    assert asked == 6


def test_says_what_cannot_be_cut() -> None:
    with pytest.raises(NotImplementedError, match="17 rows"):
        Params().check(Product(17, 1024, 1, 4096))
    with pytest.raises(NotImplementedError, match="cannot be cut"):
        Params(block_n=128).check(Product(16, 1024, 1, 64 * 3))
    with pytest.raises(NotImplementedError, match="shared memory"):
        Params(splits=1, num_stages=16, block_n=128).check(Product(16, 1024, 1, 4096))
    with pytest.raises(NotImplementedError, match="cannot be cut"):
        default_params(Product(16, 100, 1, 4096))
    for wrong in (
        {"block_n": 48},
        {"block_n": 288},
        {"block_k": 0},
        {"splits": 3},
        {"num_stages": 1},
        {"consumer_rows": 32},
        {"exchange": ""},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ManyRowsParams(**wrong)
    product = Product(128, 4096, 1, 4096)
    for words, many, changes in (
        ("96 rows", ManyRowsParams(), {"rows": 96}),
        ("320 rows", ManyRowsParams(), {"rows": 320}),
        ("read the same x", ManyRowsParams(shares_x=True), {}),
        ("read the same x", ManyRowsParams(shares_x=True, splits=2), {"segments": 2}),
        ("cannot be cut", ManyRowsParams(block_n=192), {}),
        ("clusters of more than 8", ManyRowsParams(splits=8), {"segments": 2}),
        ("registers", ManyRowsParams(block_n=256, num_stages=2), {"rows": 192}),
        ("shared memory", ManyRowsParams(num_stages=9), {}),
    ):
        with pytest.raises(NotImplementedError, match=words):
            many.check(dataclasses.replace(product, **changes))
    for wrong in ({"block_n": 32}, {"block_k": 0}, {"splits": 3}, {"num_stages": 1}, {"exchange": "post"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Params(**wrong)
