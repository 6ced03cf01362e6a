"""A KV cache in another dtype than the model's: fewer bytes a block, nearly the same answers, exact reuse."""

from __future__ import annotations

import jax.numpy as jnp
import pytest
from tiny_models import write_model

from jaxinfer import LLM, EngineConfig, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
PROMPT = list(range(40, 60))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("auto", "float32"), ("bfloat16", "bfloat16"), ("fp8", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn")],
)
def test_names(name, dtype):
    assert EngineConfig.from_kwargs(kv_cache_dtype=name).resolve("cpu", 4096).cache_dtype == dtype


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be one of auto, .*'int3'"):
        EngineConfig(kv_cache_dtype="int3")


def test_answers_hardly_change_and_reuse_is_exact(tmp_path):
    folder = str(write_model(tmp_path / "tiny"))

    def start(dtype: str) -> LLM:
        return LLM(folder, kv_cache_dtype=dtype, max_model_len=64, max_num_seqs=1, max_num_batched_tokens=32)

    def answer(llm: LLM):
        return llm.generate([PROMPT], GREEDY)[0].outputs[0]

    plain, small = start("auto"), start("fp8")
    assert {leaf.dtype for pair in small.engine.runner.caches for leaf in pair} == {jnp.dtype(jnp.float8_e4m3fn)}
    assert plain.engine.account.block == 4 * small.engine.account.block
    want, got = answer(plain), answer(small)
    first = [x.logprobs[0][x.token_ids[0]].logprob for x in (want, got)]
    assert 0 < abs(first[0] - first[1]) < 0.1
    again = answer(small)
    assert small.stats()["prefix_cache_hits"] > 0
    assert again.token_ids == got.token_ids
