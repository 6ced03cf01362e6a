"""Compile whole engine steps for a TPU: our kernels are in them, and the caches stay where they are."""

from collections.abc import Iterator

import jax
import pytest
from absent_devices import tpu
from step_programs import Kernels, check_in_place, compile_step, count_kernels

from jaxinfer.batch import BatchShape

pytestmark = pytest.mark.aot
NUM_BLOCKS = 2000  # 524 MB a cache: XLA may move one that fits in VMEM there
DECODE = BatchShape(num_tokens=32, num_rows=32, is_decode=True, block_size=128)
MIXED = BatchShape(num_tokens=2048, num_rows=256, is_decode=False, block_size=128)


@pytest.fixture(scope="module")
def sharding() -> Iterator[jax.sharding.Sharding]:
    with tpu("v6e:2x2") as device:
        yield device


@pytest.mark.parametrize(("shape", "num_kernels"), [(DECODE, 2), (MIXED, 3)], ids=["decode", "mixed"])
def test_a_step_copies_no_cache(sharding: jax.sharding.Sharding, shape: BatchShape, num_kernels: int) -> None:
    """A decode layer writes and attends; a mixed one attends in two launches."""
    compiled, cache = compile_step(sharding, shape, Kernels("mosaic_tpu", "mosaic_tpu"), num_blocks=NUM_BLOCKS)
    check_in_place(compiled, cache)
    counts = count_kernels(compiled)
    print(dict(counts))
    assert counts["tpu_custom_call"] == 2 * num_kernels


def test_a_burst_copies_no_cache(sharding: jax.sharding.Sharding) -> None:
    kernels = Kernels("mosaic_tpu", "mosaic_tpu")
    compiled, cache = compile_step(sharding, DECODE, kernels, num_blocks=NUM_BLOCKS, decode_steps=4)
    check_in_place(compiled, cache)
    assert " while(" in compiled.as_text()
