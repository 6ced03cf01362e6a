"""Compile whole engine steps for two H200s: two all-reduces a layer, and caches that stay where they are."""

import dataclasses

import pytest
from absent_devices import h200_mesh
from step_programs import (
    Kernels,
    added_by_a_layer,
    check_collectives,
    check_in_place,
    check_stage,
    compile_step,
    count_kernels,
    count_readers,
)

from jaxinfer.batch import BatchShape
from jaxinfer.kernels.linear import arg_specs
from jaxinfer.kernels.linear.tuning import tuned_params

pytestmark = pytest.mark.aot
KERNELS = Kernels.all("mosaic_gpu")
NUM_BLOCKS = 4000
DECODE = BatchShape(num_tokens=32, num_rows=32, is_decode=True, block_size=64)
MIXED = BatchShape(num_tokens=2048, num_rows=256, is_decode=False, block_size=64)


LAYER = arg_specs.layer(arg_specs.MODELS["half 8B"], DECODE.num_tokens)
NUM_PRODUCTS = sum(tuned_params(spec.product) is not None for spec in LAYER.values())
"""Of a layer's four, those that our kernels are faster at."""
NORMED = dataclasses.replace(LAYER["qkv"].product, has_norm=False)
IS_FUSED = tuned_params(NORMED, head_dim=128) is not None
"""Behind a sum that normalises, q, k and v are rotated and written by the product's kernel."""


@pytest.mark.parametrize("shape", [DECODE, MIXED], ids=["decode", "mixed"])
def test_a_divided_step_copies_no_cache(shape: BatchShape) -> None:
    compiled, cache = compile_step(h200_mesh(2), shape, KERNELS, num_blocks=NUM_BLOCKS)
    assert cache.shape == (NUM_BLOCKS, 4, 64, 128)
    check_in_place(compiled, cache)
    check_collectives(compiled)
    assert count_readers(compiled, shape) == 1


def test_with_our_all_reduce_one_of_xlas_is_left_a_step() -> None:
    """The embedding's, and the sampler's two. A layer has as kernels of ours: write, attend, two sums, and products; no
    sum comes before the first layer."""
    kernels = dataclasses.replace(KERNELS, all_reduce="mosaic_gpu")
    mesh = h200_mesh(2)
    compiled, cache = compile_step(mesh, DECODE, kernels, num_blocks=NUM_BLOCKS)
    check_in_place(compiled, cache)
    counts = count_kernels(compiled)
    print(dict(counts))
    assert counts["all-reduce"] + counts["all-reduce-start"] == 1 + 1
    assert counts["mosaic_gpu_v2"] == 2 * (4 + NUM_PRODUCTS) - IS_FUSED + 1
    added = added_by_a_layer(mesh, DECODE, kernels, NUM_BLOCKS)
    print(added)
    assert added["mosaic_gpu_v2"] == 4 + NUM_PRODUCTS - IS_FUSED
    assert added["fusion"] <= 8  # 10 where sums, residuals and norms are apart


def test_a_long_step_leaves_its_sums_to_xla() -> None:
    kernels = dataclasses.replace(KERNELS, all_reduce="mosaic_gpu")
    counts = count_kernels(compile_step(h200_mesh(2), MIXED, kernels, num_blocks=NUM_BLOCKS)[0])
    assert counts["all-reduce"] + counts["all-reduce-start"] == 2 * 2 + 1 + 1


def test_a_layer_has_two_all_reduces() -> None:
    """And no kernel beside those of a layer on one device."""
    added = added_by_a_layer(h200_mesh(2), DECODE, KERNELS, NUM_BLOCKS)
    print(added)
    assert added.pop("all-reduce", 0) + added.pop("all-reduce-start", 0) == 2
    added.pop("all-reduce-done", None)
    assert set(added) <= {"mosaic_gpu_v2", "fusion", "custom-call", "__cublas$gemm", "dot"}
    assert added["mosaic_gpu_v2"] == 2 + NUM_PRODUCTS


@pytest.mark.parametrize("first", [0, 1], ids=["first stage", "last stage"])
def test_a_stage_of_a_pipeline(first: int) -> None:
    check_stage(h200_mesh(2), first, DECODE, KERNELS, NUM_BLOCKS)


@pytest.mark.parametrize("sampler", ["cut", "full"])
def test_samplers_exchange_columns_for_rows(sampler: str) -> None:
    """Nobody holds the logits of all rows: each device has all columns of half of them; only tokens are gathered."""
    compiled, _ = compile_step(h200_mesh(2), DECODE, KERNELS, sampler=sampler)
    text = compiled.as_text()
    assert "f32[16,4096]" in text
    assert "f32[32,4096]" not in text
    assert "all-to-all" in text
