"""A KV cache in another dtype than the model's: fewer bytes a block, nearly the same answers, exact reuse."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import write_model

from jaxinfer import LLM, EngineConfig, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=8, logprobs=1, ignore_eos=True)
PROMPTS = [list(range(40, 40 + length)) for length in (3, 17)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("auto", "float32"), ("bfloat16", "bfloat16"), ("fp8", "float8_e4m3fn"), ("fp8_e4m3", "float8_e4m3fn")],
)
def test_names(name, dtype):
    assert EngineConfig.from_kwargs(kv_cache_dtype=name).resolve("cpu", 4096).cache_dtype == dtype


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"kv_cache_dtype must be one of auto, .*'int3'"):
        EngineConfig(kv_cache_dtype="int3")


def test_answers_hardly_change_and_do_not_depend_on_neighbours(tmp_path):
    folder = str(write_model(tmp_path / "tiny"))

    def start(dtype: str) -> LLM:
        return LLM(folder, kv_cache_dtype=dtype, max_model_len=128, max_num_seqs=2, max_num_batched_tokens=32)

    def first_logprobs(outputs) -> np.ndarray:
        answers = [output.outputs[0] for output in outputs]
        return np.array([answer.logprobs[0][answer.token_ids[0]].logprob for answer in answers])

    plain, small = start("auto"), start("fp8")
    assert {leaf.dtype for pair in small.engine.runner.caches for leaf in pair} == {jnp.dtype(jnp.float8_e4m3fn)}
    assert plain.engine.account.block == 4 * small.engine.account.block
    want, got = plain.generate(PROMPTS, GREEDY), small.generate(PROMPTS, GREEDY)
    assert 0 < np.abs(first_logprobs(want) - first_logprobs(got)).max() < 0.1
    again = [small.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert small.stats()["prefix_cache_hits"] > 0
    assert [x.outputs[0].token_ids for x in again] == [x.outputs[0].token_ids for x in got]
