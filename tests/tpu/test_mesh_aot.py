"""Compile whole engine steps for slices of TPUs: two all-reduces a layer, and caches that stay where they are."""

import pytest
from absent_devices import tpu_mesh
from step_programs import Kernels, added_by_a_layer, check_collectives, check_in_place, check_stage, compile_step

from jaxinfer.batch import BatchShape

pytestmark = pytest.mark.aot
KERNELS = Kernels("mosaic_tpu", "mosaic_tpu")
NUM_BLOCKS = 4000
DECODE = BatchShape(num_tokens=32, num_rows=32, is_decode=True, block_size=128)
MIXED = BatchShape(num_tokens=2048, num_rows=256, is_decode=False, block_size=128)


@pytest.mark.parametrize(
    ("topology", "shape", "kv_heads"),
    [("v6e:2x2", DECODE, 2), ("v6e:2x2", MIXED, 2), ("v6e:4x4", DECODE, 1)],
    ids=["decode", "mixed", "decode, each KV head on two"],
)
def test_a_divided_step_copies_no_cache(topology: str, shape: BatchShape, kv_heads: int) -> None:
    with tpu_mesh(topology) as mesh:
        compiled, cache = compile_step(mesh, shape, KERNELS, num_blocks=NUM_BLOCKS)
        assert cache.shape == (NUM_BLOCKS, kv_heads, 128, 128)
        check_in_place(compiled, cache)
    check_collectives(compiled)


def test_a_layer_has_two_all_reduces() -> None:
    with tpu_mesh("v6e:2x2") as mesh:
        added = added_by_a_layer(mesh, DECODE, KERNELS, NUM_BLOCKS)
    print(added)
    assert added.get("all-reduce", 0) + added.get("all-reduce-start", 0) == 2
    assert added["tpu_custom_call"] == 2


@pytest.mark.parametrize("first", [0, 1], ids=["first stage", "last stage"])
def test_a_stage_of_a_pipeline(first: int) -> None:
    with tpu_mesh("v6e:2x2") as mesh:
        check_stage(mesh, first, DECODE, KERNELS, NUM_BLOCKS)
