"""The memory account: sizes add up, refusals say what is too large, and the engine survives its own largest batch."""

from __future__ import annotations

import dataclasses
import gc
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import write_model

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import EngineConfig, ModelConfig, RopeConfig
from jaxinfer.engine.memory import every_other, leave_holes, size_pool

GB = 10**9
MODEL = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151_936,
    hidden_size=1024,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1e6),
    tie_word_embeddings=True,
)


def gpu(limit: int, in_use: int = 0) -> SimpleNamespace:
    stats = {"bytes_limit": limit, "bytes_in_use": in_use}
    return SimpleNamespace(platform="gpu", memory_stats=lambda: stats)


def size(device: SimpleNamespace, **options):
    engine = EngineConfig(**options).resolve("gpu", MODEL.max_position_embeddings)
    return size_pool(engine, MODEL, weights=int(1.2 * GB), temporaries=GB, tables=GB // 10, device=device)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(limit=st.integers(5 * GB, 200 * GB), in_use=st.integers(0, 2 * GB), share=st.floats(0.9, 1.0))
def test_terms_fill_the_total_and_never_exceed_it(limit, in_use, share):
    account = size(gpu(limit, in_use), memory_utilization=share)
    assert sum(account.terms.values()) == account.total == limit
    assert account.num_blocks >= 2
    assert account.num_blocks <= 256 * 4096 // 64 + 1
    is_capped = account.num_blocks == 256 * 4096 // 64 + 1
    assert is_capped or account.terms["unused"] < 0.04 * limit  # rounding to the grid loses little


@settings(max_examples=100, deadline=None, derandomize=True)
@given(in_use=st.integers(0, 100 * 2**20))
def test_a_little_more_or_less_memory_gives_the_same_programs(in_use):
    sizes = {size(gpu(60 * GB, used), max_model_len=4096).num_blocks for used in (in_use, in_use + 2**20)}
    assert len(sizes) <= 2
    assert all(number % 64 == 0 for number in sizes)


@pytest.mark.parametrize(
    ("weights", "temporaries", "largest"), [(4, 1, "weights"), (1, 4, "step and sampler temporaries")]
)
def test_a_refusal_names_the_largest_term(weights, temporaries, largest):
    engine = EngineConfig().resolve("gpu", 4096)
    with pytest.raises(ValueError, match=f"no room for a KV cache.*the largest is {largest}"):
        size_pool(engine, MODEL, weights=weights * GB, temporaries=temporaries * GB, tables=0, device=gpu(5 * GB))


def test_what_others_use_is_left_to_them():
    assert size(gpu(40 * GB, 20 * GB)).num_blocks < size(gpu(40 * GB)).num_blocks


def test_the_account_reads_as_a_table():
    account = size(gpu(40 * GB))
    lines = account.describe().splitlines()
    assert len(lines) == len(account.terms) + 1
    assert lines[1].split() == ["weights", "1.200", "GB"]
    assert dataclasses.replace(account, num_blocks=7).describe().endswith("(7 blocks)")


def test_the_engine_survives_its_own_largest_batch(tmp_path):
    """Every slot in use, each request as long as allowed, the budget full, and all of the pool taken at the end."""
    path = write_model(tmp_path / "model", seed=1)
    with LLM(str(path), max_num_seqs=6, max_num_batched_tokens=32, max_model_len=64, num_blocks=25, block_size=16,
             depth=2) as llm:  # fmt: skip
        rng = np.random.default_rng(0)
        prompts = [rng.integers(5, 90, 32).tolist() for _ in range(6)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
        assert [len(output.outputs[0].token_ids) for output in outputs] == [32] * 6
        assert llm.stats()["num_preemptions"] == 0  # 6 x 4 blocks are all of 24
        assert llm.stats()["num_failed_steps"] == 0


def test_every_second_small_place_is_free_again():
    gc.collect()
    before = len(jax.live_arrays())
    kept = every_other(jax.devices()[0], 256, 4)
    assert [array.nbytes for array in kept] == [256] * 5
    assert len(jax.live_arrays()) - before == 5
    assert leave_holes(jax.devices()) == []  # a CPU's allocator is the system's
