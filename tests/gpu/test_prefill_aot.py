"""Compile the prefill kernel alone for an H200 that is not there: every head_dim, in what strains registers most."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from absent_devices import h200

from jaxinfer.kernels.paged_attention import mosaic_gpu

pytestmark = pytest.mark.aot
BF16, F16, FP8 = jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn
CASES = {
    "bf16": (BF16, BF16, {}),
    "small blocks, window, softcap": (BF16, BF16, {"block_size": 16, "window": 1000, "softcap": 30.0}),
    "f16, large blocks": (F16, F16, {"block_size": 256}),
    "one head a group": (BF16, BF16, {"num_kv_heads": 32}),
    "fp8": (BF16, FP8, {}),
    "fp8, small blocks, window, softcap": (BF16, FP8, {"block_size": 16, "window": 1000, "softcap": 30.0}),
}
VARIANTS = {
    "cluster": {"cluster": 2},
    "cluster, without turns": {"cluster": 2, "take_turns": False},
    "Q in shared memory": {"q_in_registers": False},
}
# Bytes on the stack, by head_dim: read between items or while a tile is masked.
COLD_SPILLS = {112: 8}


@pytest.mark.parametrize("head_dim", mosaic_gpu.HEAD_DIMS)
@pytest.mark.parametrize("name", CASES)
def test_compiles_without_spills(
    name: str, head_dim: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    dtype, cache_dtype, options = CASES[name]
    compile_prefill(dtype, cache_dtype, head_dim=head_dim, **options)
    check_report(capfd.readouterr().out, COLD_SPILLS.get(head_dim, 0))


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_compiles_without_spills(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compile_prefill(BF16, BF16, head_dim=128, changes=VARIANTS[name])
    check_report(capfd.readouterr().out, 0)


def check_report(report: str, max_spilled: int) -> None:
    print(report)
    (spilled,) = re.findall(r"(\d+) bytes spill stores, \d+ bytes spill loads\n", report)[-1:]
    assert int(spilled) <= max_spilled
    assert "serialized" not in report  # what ptxas says when products cannot run beside other work


def compile_prefill(
    dtype: jnp.dtype,
    cache_dtype: jnp.dtype,
    *,
    head_dim: int,
    num_kv_heads: int = 8,
    block_size: int = 64,
    window: int | None = None,
    softcap: float | None = None,
    num_heads: int = 32,
    num_tokens: int = 512,
    num_rows: int = 64,
    changes: dict | None = None,
) -> None:
    shape = partial(jax.ShapeDtypeStruct, sharding=h200())
    cache = shape((200, num_kv_heads, block_size, head_dim), cache_dtype)
    params = mosaic_gpu.tuned_params(head_dim, is_fp8=cache_dtype != dtype).prefill
    params = dataclasses.replace(params, **(changes or {}))
    mosaic_gpu.check_prefill_supported(
        dtype,
        cache_dtype,
        group=num_heads // num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        has_scales=True,
        params=params,
    )

    def attend(q, k, v, block_tables, seq_lens, query_start_loc, scale):
        plan = mosaic_gpu.plan_prefill(
            seq_lens,
            query_start_loc,
            num_tokens=num_tokens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            window=window,
            params=params,
        )
        options = {"scale": head_dim**-0.5, "softcap": softcap, "k_scale": scale, "v_scale": scale}
        return mosaic_gpu.prefill_attention(q, k, v, block_tables, plan, **options)

    batch = (
        shape((num_tokens, num_heads, head_dim), dtype),
        cache,
        cache,
        shape((num_rows, 64), jnp.int32),
        shape((num_rows,), jnp.int32),
        shape((num_rows + 1,), jnp.int32),
        shape((), jnp.float32),
    )
    jax.jit(attend).lower(*batch).compile()
