"""Compile whole engine steps for an H200: the caches stay where they are."""

import pytest
from absent_devices import h200
from step_programs import Kernels, added_by_a_layer, check_in_place, compile_step, count_readers

from jaxinfer.batch import BatchShape

pytestmark = pytest.mark.aot
KERNELS = Kernels.all("mosaic_gpu")
NUM_BLOCKS = 4000
DECODE = BatchShape(num_tokens=32, num_rows=32, is_decode=True, block_size=64)
MIXED = BatchShape(num_tokens=2048, num_rows=256, is_decode=False, block_size=64)


@pytest.mark.parametrize(
    ("shape", "cache_dtype"),
    [(DECODE, "bfloat16"), (MIXED, "bfloat16"), (MIXED, "float8_e4m3fn")],
    ids=["decode", "mixed", "mixed, fp8 cache"],
)
def test_a_step_copies_no_cache(shape: BatchShape, cache_dtype: str) -> None:
    compiled, cache = compile_step(h200(), shape, KERNELS, num_blocks=NUM_BLOCKS, cache_dtype=cache_dtype)
    check_in_place(compiled, cache)
    assert count_readers(compiled, shape) == 1  # what reads it is updated in XLA's command buffer in every step


def test_a_burst_copies_no_cache() -> None:
    """Nor does the loop that it is, around its steps or inside them."""
    compiled, cache = compile_step(h200(), DECODE, KERNELS, num_blocks=NUM_BLOCKS, decode_steps=4)
    check_in_place(compiled, cache)
    assert " while(" in compiled.as_text()


def test_what_lies_between_projection_and_attention_is_one_kernel() -> None:
    """A decode layer has two of our kernels, and five fusions fewer than with the reference's writes."""
    apart, fused = (
        added_by_a_layer(h200(), DECODE, Kernels("mosaic_gpu", kv_update), NUM_BLOCKS)
        for kv_update in ("reference", "mosaic_gpu")
    )
    print(apart, fused)
    assert apart["mosaic_gpu_v2"] == 1
    assert fused["mosaic_gpu_v2"] == 2
    assert apart["fusion"] - fused["fusion"] >= 4
