"""Compile Hopper's all-reduce for the H200s of one host: no spills, no exchange of addresses, a channel left alone."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from absent_devices import h200_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxinfer.kernels.all_reduce import Channel, all_reduce, all_reduce_norm
from jaxinfer.kernels.all_reduce.arg_specs import DECODE, WIDTHS, Spec
from jaxinfer.kernels.all_reduce.channel import abstract
from jaxinfer.kernels.all_reduce.mosaic_gpu import MAX_ROWS, THREADS

pytestmark = pytest.mark.aot
NUM_LAYERS = 28


def compile_layers(ranks: int, spec: Spec, num_layers: int) -> tuple[jax.stages.Compiled, Channel]:
    """Two messages a layer, as in a decoder: one plain, one with the residual and the norm."""
    mesh = h200_mesh(ranks)
    dtype = jnp.dtype(spec.dtype)
    channel = abstract(mesh, "tensor", rows=256, hidden=spec.hidden, dtype=dtype)

    def step(x, weight, channel):
        residual = jax.lax.psum(x, "tensor")
        for _ in range(num_layers):
            x = all_reduce(x, "tensor", channel=channel, implementation="mosaic_gpu")
            x, residual = all_reduce_norm(x, residual, weight, "tensor", channel=channel, implementation="mosaic_gpu")
        return x, residual

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P()))

    specs = (P(), P(), Channel.spec(mesh))
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
    return run.lower(shape(spec.rows, spec.hidden), shape(spec.hidden), channel).compile(), channel


@pytest.mark.parametrize(
    ("ranks", "spec"), [*((2, spec) for spec in (*DECODE, *WIDTHS)), (4, DECODE[1]), (8, DECODE[1]), (4, WIDTHS[2])]
)
def test_compiles_without_spills(
    ranks: int, spec: Spec, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compile_layers(ranks, spec, 1)
    report = capfd.readouterr().out
    print(report)
    found = dict(re.findall(r"Function properties for (\w+)_mosaic_gpu_kernel\s+(.*)", report))
    assert set(found) == {"all_reduce", "all_reduce_norm"}
    assert all("0 bytes stack frame, 0 bytes spill stores" in properties for properties in found.values())


def test_the_blocks_of_a_launch_are_resident_together() -> None:
    """However many registers a thread has: at most 255, so two blocks fit a multiprocessor's 65,536."""
    assert 2 * THREADS * 256 <= 65536
    assert MAX_ROWS <= 2 * 132


def test_many_calls_of_one_program_touch_no_channel() -> None:
    """XLA copies nothing and brings no barrier or metadata; the kernels alone work on the channel."""
    compiled, channel = compile_layers(2, DECODE[1], NUM_LAYERS)
    text = compiled.as_text()
    calls = [line for line in text.splitlines() if 'custom_call_target="mosaic_gpu_v2"' in line]
    assert len(calls) == 2 * NUM_LAYERS
    assert all("uses_xla_collective_metadata = false" in line for line in calls)
    local = f"u32[1,{channel.memory.shape[1]}]"
    assert not [line for line in text.splitlines() if " copy" in line and local in line]
    assert compiled.memory_analysis().temp_size_in_bytes < channel.memory.shape[1]


def test_what_is_sent_cannot_be_empty(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """The addition of +0 is there, once for each two elements that a thread sends."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    compile_layers(2, DECODE[0], 1)
    text = capfd.readouterr().out
    body = text[text.index(".entry all_reduce_mosaic_gpu_kernel") :]
    body = body[: body.index("\n}")]
    assert body.count("add.rn.bf16x2") == 4096 // 2 // 128
    assert body.count("st.relaxed.sys.global.v4.b32") == 4 + 2 * 4  # to the peer, and EMPTY into both slots
