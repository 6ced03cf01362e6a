"""Compile every tuned configuration of the Hopper kernels for an H200, with no GPU present."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from absent_devices import h200

from jaxinfer.kernels.paged_attention import mosaic_gpu

pytestmark = pytest.mark.aot
# ptxas keeps a few addresses of barriers, which overflow the uniform registers, on the stack; they are read
# between items, never in the loop over keys.
COLD_SPILLS = {"paged_decode": 0, "paged_prefill": 48}
FP8 = jnp.float8_e4m3fn
OPTIONS = [
    {},
    {"block_size": 16, "window": 1000, "softcap": 30.0},
    {"block_size": 256, "num_heads": 8, "dtype": jnp.float16},
    {"num_heads": 24},
    {"num_heads": 32, "num_kv_heads": 1},
]
FP8_OPTIONS = {
    "small blocks": OPTIONS[1],
    "large group": OPTIONS[-1],
    "keys in registers": {"decode": {"keys_in_registers": True}},
}


@pytest.mark.parametrize("head_dim", mosaic_gpu.HEAD_DIMS)
@pytest.mark.parametrize("name", FP8_OPTIONS)
def test_fp8_decode_compiles(
    name: str, head_dim: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    options = FP8_OPTIONS[name]
    if name == "large group" and head_dim == 256:
        options = options | {"num_heads": 16}  # all that registers hold
    compile_step(head_dim=head_dim, cache_dtype=FP8, max_query_len=1, **options)
    check_report(capfd.readouterr().out, {"paged_decode"})


@pytest.mark.parametrize("head_dim", mosaic_gpu.HEAD_DIMS)
@pytest.mark.parametrize("options", [OPTIONS[0], {"cache_dtype": FP8}, *OPTIONS[1:]], ids=str)
def test_mixed_step_compiles(
    options: dict, head_dim: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    compile_step(head_dim=head_dim, **options)
    check_report(capfd.readouterr().out, {"paged_decode", "paged_prefill"})


def check_report(report: str, kernels: set[str]) -> None:
    print(report)
    spills = re.findall(
        r"Function properties for (paged_\w+?)_mosaic_gpu_kernel.*?(\d+) bytes spill stores",
        report,
        re.DOTALL,
    )
    assert {name for name, _ in spills} == kernels
    for name, stored in spills:
        assert int(stored) <= COLD_SPILLS[name]


def compile_step(
    *,
    head_dim: int,
    num_heads: int = 32,
    num_kv_heads: int = 8,
    block_size: int = 64,
    window: int | None = None,
    softcap: float | None = None,
    dtype: jnp.dtype = jnp.bfloat16,
    cache_dtype: jnp.dtype | None = None,
    num_tokens: int = 512,
    num_rows: int = 64,
    max_query_len: int | None = None,
    decode: dict | None = None,
) -> None:
    """A step of a layer: its plan and the decode kernel, or both kernels where rows may have several tokens.

    `decode` has fields of DecodeParams that are not to be the tuned ones.
    """
    params = mosaic_gpu.tuned_params(head_dim, is_fp8=cache_dtype is not None)
    params = dataclasses.replace(params, decode=dataclasses.replace(params.decode, **decode or {}))
    sharding = h200()
    shape = partial(jax.ShapeDtypeStruct, sharding=sharding)
    cache = shape((200, num_kv_heads, block_size, head_dim), cache_dtype or dtype)
    scales = {} if cache_dtype is None else {name: shape((), jnp.float32) for name in ("k_scale", "v_scale")}
    batch = (
        shape((num_tokens, num_heads, head_dim), dtype),
        cache,
        cache,
        shape((num_rows, 64), jnp.int32),
        shape((num_rows,), jnp.int32),
        shape((num_rows + 1,), jnp.int32),
    )

    def step(q, k_cache, v_cache, block_tables, seq_lens, query_start_loc, scales):
        plan = mosaic_gpu.plan(
            seq_lens,
            query_start_loc,
            num_tokens=num_tokens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=window,
            max_query_len=max_query_len,
            params=params,
        )
        options = {"scale": head_dim**-0.5, "window": window, "softcap": softcap, "step_plan": plan}
        batch = (q, k_cache, v_cache, block_tables, seq_lens, query_start_loc)
        return mosaic_gpu.paged_attention(*batch, **options, **scales)

    jax.jit(step).lower(*batch, scales).compile()
