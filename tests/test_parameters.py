"""Parameters are checked where they enter: field and value are named, before anything is allocated."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxinfer import EngineConfig, SamplingParams
from jaxinfer.core import MAX_LOGIT_BIAS

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (NAN, INF, -0.1, "hot", None, True)],
        *[("top_p", value) for value in (0, 0.0, -1, 1.1, NAN)],
        *[("top_k", value) for value in (-2, 1.5, NAN)],
        *[("min_p", value) for value in (-0.1, 1.1, NAN)],
        *[(name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-2.1, 2.1, NAN, INF)],
        *[("repetition_penalty", value) for value in (0, -1, NAN, INF)],
        ("temperature", 10**400),
        ("stop", 5),
        ("stop_token_ids", 5),
        ("allowed_token_ids", 5),
        ("logit_bias", {"x": 1.0}),
        ("logit_bias", {1.7: 1.0}),
        *[("seed", value) for value in (1.5, 2**64, -(2**63) - 1)],
        *[("max_tokens", value) for value in (0, -1, 2.5)],
        *[("min_tokens", value) for value in (-1, 2.5)],
        *[("logprobs", value) for value in (-1, 21, 1.5)],
        *[("n", value) for value in (0, -1, 1.5, 2000)],
        *[("stop", value) for value in ("", ["a", ""], [3])],
        *[("bad_words", value) for value in ("", [3], ["w"] * 65)],
        *[("stop_token_ids", value) for value in ([-1], [2**63], [1.5])],
        *[("allowed_token_ids", value) for value in ([], [-1])],
        *[("logit_bias", value) for value in ({-1: 1.0}, {1: NAN}, {1: INF}, {2**63: 1.0}, [1])],
        ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
    ],
    ids=str,
)
def test_senseless_values_are_named(field, value):
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_combinations_that_cannot_be():
    with pytest.raises(ValueError, match="min_tokens 20 is beyond max_tokens 16"):
        SamplingParams(min_tokens=20)
    with pytest.raises(ValueError, match="stop strings need detokenize"):
        SamplingParams(stop="x", detokenize=False)
    with pytest.raises(TypeError):
        SamplingParams(tempreature=1.0)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
@pytest.mark.parametrize("token", [100, 101])
def test_ids_beyond_the_vocabulary(field, token):
    """B12."""
    value = {token: 1.0} if field == "logit_bias" else [token]
    with pytest.raises(ValueError, match=f"{field}: token id {token} is outside the vocabulary of 100"):
        SamplingParams(**{field: value}).check_vocabulary(100)
    SamplingParams(**{field: {99: 1.0} if field == "logit_bias" else [99]}).check_vocabulary(100)


def test_numbers_of_other_libraries_and_json_keys():
    params = SamplingParams(
        seed=np.int64(5), temperature=np.float32(0.5), max_tokens=np.int32(3), logit_bias={"7": 1.0}
    )
    assert params.logit_bias == {7: 1.0}


def test_fields_may_be_set_and_are_checked_at_submission():
    params = SamplingParams(stop="a")
    params.max_tokens = 4
    params.stop = ["b", "c"]
    assert dataclasses.replace(params).stop == ("b", "c")
    params.top_p = 3.0
    with pytest.raises(ValueError, match="top_p"):
        dataclasses.replace(params)


def test_which_sampler_a_request_needs():
    assert not SamplingParams(temperature=0.7).needs_full_sampler
    assert not SamplingParams(temperature=0.0, top_k=5, top_p=0.5).uses_cuts  # they keep the best
    for params in (
        {"logprobs": 0},
        {"min_tokens": 1},
        {"presence_penalty": 0.1},
        {"bad_words": ["x"]},
    ):
        assert SamplingParams(**params).needs_full_sampler
    for params in ({"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}):
        assert SamplingParams(**params).uses_cuts
        assert not SamplingParams(**params).needs_full_sampler
    assert not SamplingParams(temperature=0.7).uses_cuts


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "int4"}, "dtype must be one of auto, float32"),
        ({"block_size": 0}, "block_size must be an integer of at least 1, got 0"),
        ({"num_blocks": 1}, "num_blocks must be an integer of at least 2"),
        ({"max_num_seqs": 2.5}, "max_num_seqs must be an integer"),
        ({"memory_utilization": 0}, r"memory_utilization must be in \(0, 1\]"),
        ({"gpu_memory_utilization": 1.5}, r"memory_utilization must be in \(0, 1\], got 1.5"),
        ({"memory_utilization": 0.5, "gpu_memory_utilization": 0.5}, "are the same setting"),
        ({"tensor_parallel_size": 2, "mesh": "tensor=2"}, "are the same setting"),
        ({"enforce_eager": True}, "enforce_eager=True is not supported"),
        ({"quantization": "awq"}, "quantization='awq' is not supported"),
        ({"max_modle_len": 5}, "unknown argument max_modle_len; did you mean max_model_len"),
        ({"policy": "random"}, "policy must be one of fcfs, priority"),
        ({"seed": 1.5}, "seed must be an integer"),
    ],
    ids=str,
)
def test_engine_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_kwargs(**settings)


def test_vllm_names_are_accepted():
    config = EngineConfig.from_kwargs(
        model="m",
        gpu_memory_utilization=0.8,
        num_gpu_blocks_override=10,
        tensor_parallel_size=1,
        enforce_eager=False,
    )
    assert (config.memory_utilization, config.num_blocks) == (0.8, 10)


def test_automatic_values_follow_the_platform():
    cpu, gpu, tpu = (EngineConfig().resolve(platform, 8192) for platform in ("cpu", "gpu", "tpu"))
    assert (cpu.dtype, cpu.block_size, cpu.max_num_batched_tokens, cpu.warmup) == ("float32", 16, 512, "lazy")
    assert (gpu.dtype, gpu.block_size, gpu.max_num_seqs, gpu.warmup) == ("bfloat16", 64, 256, "full")
    assert tpu.block_size == 128
    assert EngineConfig(dtype="float16", block_size=32).resolve("gpu", 100).block_size == 32
