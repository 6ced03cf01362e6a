"""Compile Hopper's KV writes for an H200, with no GPU present: in registers, in place, with addresses of 64 bits."""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from absent_devices import h200

from jaxinfer.kernels.kv_update import kv_update, rope_kv_update

pytestmark = pytest.mark.aot
FP8 = jnp.float8_e4m3fn


@pytest.fixture(scope="module")
def sharding() -> jax.sharding.Sharding:
    return h200()


def compile_layers(
    sharding: jax.sharding.Sharding,
    *,
    kv_heads: int = 8,
    group: int = 4,
    head_dim: int = 128,
    num_tokens: int = 256,
    num_blocks: int = 1000,
    dtype: Any = jnp.bfloat16,
    cache_dtype: Any = None,
    has_norm: bool = True,
    has_scales: bool = False,
) -> tuple[jax.stages.Compiled, jax.ShapeDtypeStruct]:
    """Two layers that write K and V, the second after plain rows; caches are donated."""
    shape = partial(jax.ShapeDtypeStruct, sharding=sharding)
    cache = shape((num_blocks, kv_heads, 64, head_dim), cache_dtype or dtype)
    qkv = shape((num_tokens, kv_heads, group + 2, head_dim), dtype)
    angles = shape((num_tokens, head_dim // 2), jnp.float32)
    norm = shape((head_dim,), dtype) if has_norm else None
    scale = shape((), jnp.float32) if has_scales else None

    @jax.jit
    def layer(qkv, caches, cos, sin, slots, norm, scale):
        scales = {"k_scale": scale, "v_scale": scale, "implementation": "mosaic_gpu"}
        q, *caches = rope_kv_update(qkv, *caches, cos, sin, slots, q_norm=norm, k_norm=norm, **scales)
        return q, kv_update(*caches, qkv[:, :, -2], qkv[:, :, -1], slots, **scales)

    def step(layers, qkv, *rest):
        written = []
        for caches in layers:
            q, caches = layer(qkv, caches, *rest)
            qkv = qkv.at[:, :, :-2].add(q.reshape(num_tokens, kv_heads, group, head_dim))
            written.append(caches)
        return written, qkv

    rest = (angles, angles, shape((num_tokens,), jnp.int32), norm, scale)
    return jax.jit(step, donate_argnums=0).lower([(cache, cache)] * 2, qkv, *rest).compile(), cache


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"group": 2},
        {"kv_heads": 3, "group": 3, "head_dim": 64, "has_norm": False},
        {"kv_heads": 32, "group": 1, "has_norm": False},
        {"kv_heads": 1, "group": 8, "num_tokens": 1},
        {"dtype": jnp.float16},
        {"cache_dtype": FP8},
        {"cache_dtype": FP8, "has_scales": True, "group": 7, "kv_heads": 2},
        *({"head_dim": head_dim} for head_dim in (80, 96, 112, 192, 256)),
        *({"head_dim": head_dim, "cache_dtype": FP8, "kv_heads": 1} for head_dim in (80, 96, 112, 192, 256)),
    ],
    ids=str,
)
def test_compiles_without_spills_and_in_place(
    sharding: jax.sharding.Sharding,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compiled, cache = compile_layers(sharding, **options)
    report = capfd.readouterr().out
    print(report)
    found = dict(re.findall(r"Function properties for (\w+)_mosaic_gpu_kernel\s+(.*)", report))
    assert set(found) == {"kv_update", "rope_kv_update"}
    assert all("0 bytes stack frame, 0 bytes spill stores" in properties for properties in found.values())
    analysis = compiled.memory_analysis()
    assert analysis.alias_size_in_bytes >= 4 * cache.size * cache.dtype.itemsize
    assert analysis.temp_size_in_bytes < cache.size * cache.dtype.itemsize
    dims = f"[{','.join(map(str, cache.shape))}]"
    assert not [line for line in compiled.as_text().splitlines() if " copy(" in line and dims in line]


def test_blocks_beyond_32_bits(
    sharding: jax.sharding.Sharding, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A block's number is widened before it is multiplied by a block's bytes, here 8 x 64 x 128 x 2 = 2^17."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    compile_layers(sharding, num_blocks=40_000)  # 2.6e9 elements
    text = capfd.readouterr().out
    for name in ("rope_kv_update", "kv_update"):
        body = text[text.index(f".entry {name}_mosaic_gpu_kernel") :]
        body = body[: body.index("\n}")]
        (block,) = set(re.findall(r"shr\.u32\s+(%r\d+), %r\d+, 6;", body))
        uses = [line.strip() for line in body.splitlines() if re.search(rf"{block}\b[,;]", line)]
        wide = [line for line in uses if re.match(r"mul\.wide\.[us]32\s+%rd\d+, %r\d+, 131072;", line)]
        assert wide, uses
        assert not [line for line in uses if re.match(r"(shl\.b32|mul\.lo\.[su]32|mad\.lo\.s32)", line)]
