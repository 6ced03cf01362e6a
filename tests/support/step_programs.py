"""Whole engine steps, compiled ahead of time for a device that is not there."""

from __future__ import annotations

import collections
import re

import jax

from jaxinfer.batch import BatchLayout, BatchShape, DeviceShapes
from jaxinfer.config import Kernels, ModelConfig, RopeConfig
from jaxinfer.engine.programs import Programs
from jaxinfer.models import build_model, divide
from jaxinfer.sharding.placement import on_mesh

QWEN3_8B = {
    "architecture": "Qwen3ForCausalLM",
    "vocab_size": 4096,  # of 151,936: the head is compiled sooner, and layers do not know it
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope": RopeConfig(theta=1e6),
    "tie_word_embeddings": False,
    "has_qk_norm": True,
}

MAX_TOKENS = 4096
"""Of an engine's largest step: where a step leaves its hidden states is longer than they are."""


def compile_step(
    where: jax.sharding.Sharding | jax.sharding.Mesh,
    shape: BatchShape,
    kernels: Kernels,
    *,
    num_layers: int = 2,
    num_blocks: int = 2000,
    cache_dtype: str = "bfloat16",
    decode_steps: int = 1,
    stage: tuple[int, int] | None = None,
    sampler: str | None = None,
) -> tuple[jax.stages.Compiled, jax.ShapeDtypeStruct]:
    """A step of a model of Qwen3-8B's sizes in bfloat16, and the shape of one of its caches on a device.

    With more than one of `decode_steps`, it is a burst of so many; with a `stage` (first layer, number of layers), that
    stage's share of the step; with a `sampler`, that program for as many rows.
    """
    config = ModelConfig(num_layers=num_layers, **QWEN3_8B)
    cut = divide(config, where if isinstance(where, jax.sharding.Mesh) else None, *stage or ())
    model = build_model(cut, "bfloat16", kernels)  # pyright: ignore[reportArgumentType]
    max_blocks = config.max_position_embeddings // shape.block_size
    sizes = DeviceShapes(256, max_blocks, 4096, config.vocab_size, max_tokens=MAX_TOKENS)
    programs = Programs(
        model,
        cut.whole,
        sizes,
        num_blocks=num_blocks,
        block_size=shape.block_size,
        dtype="bfloat16",
        cache_dtype=cache_dtype,
        mesh=cut.mesh,
        message_rows=256,
        decode_steps=decode_steps,
        is_first=cut.is_first,
        is_last=cut.is_last,
    )
    key = programs.step_key(shape) if decode_steps == 1 else programs.burst_key(shape)
    key = key if sampler is None else (sampler, shape.num_rows)
    function, donated, arguments = programs._describe(key)
    page = programs.caches[0][0]
    if isinstance(where, jax.sharding.Mesh):
        function, arguments = on_mesh(function, arguments, programs._results(key, arguments), where)
        page = jax.ShapeDtypeStruct(page.sharding.shard_shape(page.shape), page.dtype)
    else:
        arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), arguments)
    compiled = jax.jit(function, donate_argnums=donated, keep_unused=True).lower(*arguments).compile()
    check_no_kernel_is_fused(compiled)
    return compiled, page


def check_in_place(compiled: jax.stages.Compiled, cache: jax.ShapeDtypeStruct, *, num_layers: int = 2) -> None:
    """Every cache is where it was, nothing of a cache's size is made beside them, no instruction copies one."""
    cache_bytes = cache.size * cache.dtype.itemsize
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= 2 * num_layers * cache_bytes
    assert analysis.temp_size_in_bytes < cache_bytes
    dims = f"[{','.join(map(str, cache.shape))}]"
    text = (line.split(", metadata=")[0] for line in compiled.as_text().splitlines())
    assert not [line for line in text if re.search(r" copy(-start)?\(", line) and dims in line]


def check_no_kernel_is_fused(compiled: jax.stages.Compiled) -> None:
    """XLA fuses a copy of a kernel with what reads or writes a part of an array, and the kernel then runs twice."""
    computation = ""
    for line in compiled.as_text().splitlines():
        computation = line.split(" ")[0] if line and not line.startswith(" ") else computation
        assert "mosaic" not in line or "slice-fusion" not in computation, line


def count_kernels(compiled: jax.stages.Compiled) -> collections.Counter[str]:
    """What the entry computation launches: fusions, products, collectives, kernels by name."""
    counts: collections.Counter[str] = collections.Counter()
    for line in entry_lines(compiled):
        found = re.search(
            r" (fusion|custom-call|copy|dot|convolution|sort|while|scatter|gather|reduce|[a-z-]*all-[a-z-]+|"
            r"collective-[a-z-]+)\(",
            line,
        )
        if found is None:
            continue
        name = re.search(r'custom_call_target="([^"]+)"', line)
        counts[name.group(1) if name else found.group(1)] += 1
    return counts


def entry_lines(compiled: jax.stages.Compiled) -> list[str]:
    """Instructions of the entry computation."""
    text = compiled.as_text()
    entry = text[text.index("\nENTRY ") :]
    return entry[: entry.index("\n}")].splitlines()


def count_readers(compiled: jax.stages.Compiled, shape: BatchShape) -> int:
    """How many instructions read the plan where the host has put it, which is elsewhere in every step."""
    lines = entry_lines(compiled)
    size = BatchLayout(shape).size
    (name,) = {found.group(1) for line in lines if (found := re.search(rf"(%\S+) = s32\[{size}\]\S* parameter", line))}
    return sum(bool(re.search(rf"[(\s]{re.escape(name)}[,)]", line)) for line in lines)


def check_collectives(compiled: jax.stages.Compiled) -> None:
    """What a divided step of two layers sends, where XLA makes all of its sums."""
    counts = count_kernels(compiled)
    print(dict(counts))
    # two layers, the embedding, the largest logit; then the candidates
    assert counts["all-reduce"] + counts["all-reduce-start"] == 2 * 2 + 1 + 1
    assert counts["all-gather"] + counts["all-gather-start"] == 1
    assert counts["all-to-all"] + counts["collective-permute"] + counts["collective-permute-start"] == 0


def added_by_a_layer(
    where: jax.sharding.Sharding | jax.sharding.Mesh, shape: BatchShape, kernels: Kernels, num_blocks: int
) -> dict[str, int]:
    """What a second layer launches."""
    two, one = (
        count_kernels(compile_step(where, shape, kernels, num_layers=layers, num_blocks=num_blocks)[0])
        for layers in (2, 1)
    )
    return {name: two[name] - one[name] for name in sorted(two) if two[name] != one[name]}


def check_stage(where: jax.sharding.Mesh, first: int, shape: BatchShape, kernels: Kernels, num_blocks: int) -> None:
    """The layer `first` of two as a stage: its caches stay where they are; no embedding is there, or no sampler."""
    compiled, cache = compile_step(where, shape, kernels, num_blocks=num_blocks, stage=(first, 1))
    check_in_place(compiled, cache, num_layers=1)
    assert count_readers(compiled, shape) == 1
    counts = count_kernels(compiled)
    print(dict(counts))
    # the layer's two, and the embedding's or the sampler's, which also gathers candidates
    assert counts["all-reduce"] + counts["all-reduce-start"] == 2 + 1
    assert counts["all-gather"] + counts["all-gather-start"] == first
