"""Kernels that ask the L2 cache for the next weight, compiled for H200s: what they ask for, and that all else stays."""

import dataclasses
import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from absent_devices import h200, h200_mesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from step_programs import Kernels, check_in_place, compile_step, count_kernels, count_readers, entry_lines

from jaxinfer.batch import BatchShape
from jaxinfer.kernels.all_reduce import Channel, all_reduce_norm
from jaxinfer.kernels.all_reduce.channel import abstract
from jaxinfer.kernels.linear import api, linear
from jaxinfer.kernels.linear.tuning import PrefetchSettings
from jaxinfer.kernels.paged_attention import paged_attention, plan
from jaxinfer.kernels.prefetch import PIECE, THREADS, Prefetch

pytestmark = pytest.mark.aot
NEXT = (4096, 4096)
MAX_BYTES = 8 << 20
SHAPE = BatchShape(num_tokens=32, num_rows=32, is_decode=True, block_size=64)
INSTRUCTION = re.compile(r"cp\.async\.bulk\.prefetch\.L2\.global \[%rd\d+\], (\d+)")


@cache
def one_device() -> jax.sharding.Sharding:
    return h200()


def shaped(*dims: int, dtype: Any = jnp.bfloat16, where: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype, sharding=where or one_device())


def compile_linear(rows: int, weight: tuple[int, ...], ahead: jax.ShapeDtypeStruct, parts: int) -> None:
    def multiply(x, weight, ahead):
        prefetch = Prefetch.of(ahead, MAX_BYTES, parts=parts)
        return linear(x, weight, prefetch=prefetch, implementation="mosaic_gpu")

    jax.jit(multiply).lower(shaped(rows, weight[0]), shaped(*weight), ahead).compile()


def compile_attention(ahead: jax.ShapeDtypeStruct, parts: int) -> None:
    def attend(q, k, v, tables, seq_lens, starts, ahead):
        heads = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
        step_plan = plan("mosaic_gpu", seq_lens, starts, num_tokens=16, **heads, is_decode=True)
        options = {"implementation": "mosaic_gpu", "step_plan": step_plan}
        prefetch = Prefetch.of(ahead, MAX_BYTES, parts=parts, delay=1234)
        return paged_attention(q, k, v, tables, seq_lens, starts, scale=0.1, prefetch=prefetch, **options)

    pages, ids = shaped(500, 8, 64, 128), partial(shaped, dtype=jnp.int32)
    jax.jit(attend).lower(shaped(16, 32, 128), pages, pages, ids(16, 32), ids(16), ids(17), ahead).compile()


def compile_sum(ahead: jax.ShapeDtypeStruct, parts: int) -> None:
    mesh = h200_mesh(2)
    everywhere = NamedSharding(mesh, P())

    def add(x, weight, channel, ahead):
        x = jax.lax.psum(x, "tensor")
        prefetch = Prefetch.of(ahead, MAX_BYTES, parts=parts, delay=1234)
        options = {"channel": channel, "implementation": "mosaic_gpu"}
        return all_reduce_norm(x, x, weight, "tensor", prefetch=prefetch, **options)

    specs = (P(), P(), Channel.spec(mesh), P())
    run = jax.jit(jax.shard_map(add, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
    channel = abstract(mesh, "tensor", rows=256, hidden=4096, dtype=jnp.dtype(jnp.bfloat16))
    x, weight = shaped(16, 4096, where=everywhere), shaped(4096, where=everywhere)
    run.lower(x, weight, channel, shaped(*ahead.shape, where=everywhere)).compile()


HOSTS: dict[str, tuple[Callable[[jax.ShapeDtypeStruct, int], None], int]] = {
    "few rows": (lambda ahead, parts: compile_linear(16, (1024, 4096), ahead, parts), 64 * 2),
    "many rows": (lambda ahead, parts: compile_linear(128, (4096, 4096), ahead, parts), 64 * 2),
    "attention": (compile_attention, 132 * 2),
    "sum": (compile_sum, 132 - 16),
}
"""Kernels, and how many of their warpgroups ask."""


@pytest.mark.parametrize("parts", [1, 4])
@pytest.mark.parametrize("name", HOSTS)
def test_kernels_ask(name: str, parts: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compile_host, askers = HOSTS[name]
    compile_host(shaped(*NEXT), parts)
    report = capfd.readouterr().out
    found = INSTRUCTION.findall(report)
    places = 2 if name == "attention" else 1  # a CTA with tiles and one without
    assert found == [str(PIECE)] * (places * -(-MAX_BYTES // (PIECE * THREADS * askers)))
    waits = re.findall(r"setp\S+\s+%p\d+, %rd\d+, 1234;", report)
    assert len(waits) == (name in ("attention", "sum"))
    assert set(re.findall(r"(\d+) bytes spill stores", report)) == {"0"}


def count_operands(compiled: jax.stages.Compiled) -> int:
    """Of all kernels of ours together."""
    calls = [line for line in entry_lines(compiled) if 'custom_call_target="mosaic_gpu_v2"' in line]
    return sum(line[line.index("custom-call(") : line.index("), custom_call_target")].count("%") for line in calls)


@pytest.mark.parametrize(("devices", "asked"), [(1, 2 + 2 + 1), (2, 2 + 2 + 2 + 1)])
def test_a_step_stays_what_it_is(devices: int, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many kernels, caches in place, no copy of a weight. Of two layers, attention asks for out's weight, out or the
    sum behind it for gate and up's, gate and up for down's where the kernel is ours, which it is over two devices, and
    the first layer's last one for the second's q, k and v.
    """
    where = one_device() if devices == 1 else h200_mesh(devices)
    kernels = dataclasses.replace(Kernels.all("mosaic_gpu"), all_reduce="psum" if devices == 1 else "mosaic_gpu")
    programs = []
    for settings in (PrefetchSettings(), PrefetchSettings(32, 16 << 20)):
        monkeypatch.setattr(api, "prefetch_settings", lambda settings=settings: settings)
        jax.clear_caches()  # of layers traced
        programs.append(compile_step(where, SHAPE, kernels, num_blocks=4000))
    (before, _), (after, cache) = programs
    check_in_place(after, cache)
    assert count_kernels(after) == count_kernels(before)
    assert count_readers(after, SHAPE) == 1
    temporaries = [compiled.memory_analysis().temp_size_in_bytes for compiled in (before, after)]
    assert temporaries[1] == temporaries[0]
    assert count_operands(after) - count_operands(before) == asked
