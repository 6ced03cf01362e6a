"""Compile the Hopper sampling kernels for an H200, with no GPU present."""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from absent_devices import h200

from jaxinfer.kernels.sampling import mosaic_gpu, reference
from jaxinfer.kernels.sampling.mosaic_gpu_tiles import TilesParams

pytestmark = pytest.mark.aot
NUM_SLOTS = 1024


KERNELS = {
    "plain": {"sampling_slot_tiles", "sampling_slot_pick"},
    "plain, fused": {"sampling_slots"},
    "not cut": {"sampling_tiles", "sampling_pick"},
    "cut": {"sampling_tiles", "sampling_cuts"},
}


@pytest.mark.parametrize(
    ("kind", "num_rows", "vocab"),
    [
        ("plain", 256, 151936),
        ("plain", 1, 50257),
        ("plain, fused", 256, 151936),
        ("not cut", 3, 128256),
        ("cut", 256, 151936),
        ("cut", 1, 49152),
    ],
)
def test_compiles_without_spills(
    kind: str, num_rows: int, vocab: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Zero spills; the logits are not copied unless rows are no whole tiles; slots change where they are."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled = compile_sampler(kind, num_rows, vocab)
    report = capfd.readouterr().out
    print(re.sub(r"(?m)^ptxas \S+, line .*\n", "", report))
    functions = r"Function properties for (sampling_\w+?)_mosaic_gpu_kernel.*?(\d+) bytes spill stores"
    assert dict(re.findall(functions, report, re.DOTALL)) == dict.fromkeys(KERNELS[kind], "0")
    memory = compiled.memory_analysis()
    assert (memory.temp_size_in_bytes > 4 * num_rows * vocab) == (vocab % 128 != 0)
    if kind.startswith("plain"):
        assert memory.alias_size_in_bytes == 20 * NUM_SLOTS  # all four tables
        if vocab % 128 == 0:
            kernels = re.findall(r"= .*? (fusion|custom-call|copy|scatter)\(", compiled.as_text())
            assert kernels == ["custom-call"] * len(KERNELS[kind])


def compile_sampler(kind: str, num_rows: int, vocab: int) -> jax.stages.Compiled:
    shape = partial(jax.ShapeDtypeStruct, sharding=h200())
    column, table = partial(shape, (num_rows,)), partial(shape, (NUM_SLOTS,))
    logits = shape((num_rows, vocab), jnp.float32)
    if kind.startswith("plain"):
        params = mosaic_gpu.Params(TilesParams(is_fused=kind != "plain"))
        seeds = shape((NUM_SLOTS, 2), jnp.uint32)
        slots = reference.Slots(table(jnp.int32), table(jnp.int32), table(jnp.float32), seeds)
        rows = column(jnp.int32), column(jnp.bool_), column(jnp.int32)
        return (
            jax.jit(partial(mosaic_gpu.sample_slots, params=params), donate_argnums=4)
            .lower(logits, *rows, slots)
            .compile()
        )
    cuts = {"min_p": column(jnp.float32), "top_k": column(jnp.int32), "top_p": column(jnp.float32)}
    rows = column(jnp.float32), shape((num_rows, 2), jnp.uint32), column(jnp.int32)
    return jax.jit(mosaic_gpu.sample).lower(logits, *rows, **(cuts if kind == "cut" else {})).compile()
