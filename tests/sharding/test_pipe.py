"""The pipe axis on fake devices: stages on devices of their own, steps of several groups on their way through them."""

from __future__ import annotations

import dataclasses
import re

import jax
import numpy as np
import pytest
from flax import nnx
from golden_cases import read, supported
from golden_configs import llama_config, qwen3_config
from mesh_cases import GREEDY, PARAMS, SETTINGS, compare_logprobs, run
from tiny_models import write_model

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import EngineConfig
from jaxinfer.engine.build import load_weights
from jaxinfer.engine.pipeline import Pipeline
from jaxinfer.loaders import open_checkpoint, save_orbax
from jaxinfer.models import build_model, cut_stages, parse_config
from jaxinfer.sharding.mesh import resolve_mesh


@pytest.fixture(scope="module")
def golden():
    return read("qwen3_tied")[0]  # three layers


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory):
    path = tmp_path_factory.mktemp("pipe") / "model"
    return write_model(path, golden["config"], seed=golden["seed"], with_tokenizer=False)


@pytest.fixture(scope="module")
def llm(folder):
    """Three rows in two groups, and a step more in flight than there are stages."""
    settings = {**SETTINGS, "max_num_seqs": 3, "depth": 3}
    with LLM(str(folder), mesh="pipe=2", pipe_layers=(1, 2), **settings) as llm:
        yield llm


# -- tokens --------------------------------------------------------------------------------------


def test_tokens_are_the_single_devices(llm, folder, golden):
    """A golden's tokens, and each sampler in more requests than there are rows."""
    prompt, params = golden["input_ids"], [PARAMS[number] for number in (0, 3, 5, 0, 3)]
    assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == golden["greedy_ids"]
    prompts = [[*prompt[:20], number] for number in range(len(params))]
    outputs = llm.generate(prompts, params)
    for output, one in zip(outputs, run(folder, None, prompts, params), strict=True):
        assert output.outputs[0].token_ids == one[0]
        compare_logprobs(output.outputs[0].logprobs, one[1])
        compare_logprobs(output.prompt_logprobs, one[2])
    stats = llm.stats()
    assert stats["num_failed_steps"] == stats["num_compiles_while_serving"] == stats["kv_cache_usage_perc"] == 0


def test_groups_take_turns(llm, monkeypatch):
    """Two requests are never in one step, so both stages have work; one alone has every step."""
    pipeline, groups = llm.engine.runner, []
    assert isinstance(pipeline, Pipeline)
    original = pipeline.dispatch

    def record(plan):
        groups.append((plan.group, plan.num_rows))
        return original(plan)

    monkeypatch.setattr(pipeline, "dispatch", record)
    llm.generate([[1, 2, 3], [4, 5, 6]], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    assert groups[:12] == groups[:2] * 6
    assert sorted(groups[:2]) == [(0, 1), (1, 1)]
    groups.clear()
    llm.generate([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True))
    assert len(set(groups)) == 1


def test_a_failed_step_costs_its_requests_only(llm, golden, monkeypatch):
    """The second stage fails: what was in flight ends with an error, and nothing of it reaches later requests."""
    last, calls = llm.engine.runner.stages[-1], []
    original = last.dispatch

    def fail(*arguments):
        calls.append(1)
        if len(calls) == 3:
            last.caches[0][0].delete()  # what a device error half way leaves behind
        return original(*arguments)

    monkeypatch.setattr(last, "dispatch", fail)
    outputs = llm.generate([[1, 2, 3], [4, 5, 6]], GREEDY)
    assert all(output.outputs[0].finish_reason == "error" for output in outputs)
    assert llm.generate(golden["input_ids"], GREEDY)[0].outputs[0].token_ids == golden["greedy_ids"]


@pytest.mark.slow
@pytest.mark.parametrize("name", supported())
def test_every_architecture(name, tmp_path):
    """Tokens and log-probabilities of every golden model, with 8 query heads too where its own cannot be divided."""
    golden, _ = read(name)
    meshes, divided = ["pipe=2", "data=2"], ["data=2,pipe=2,tensor=2"]
    cases = [(golden["config"], meshes + divided)]
    if golden["config"]["num_attention_heads"] % 2:
        other = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": golden["config"].get("head_dim", 8)}
        cases = [(golden["config"], meshes), (golden["config"] | other, divided)]
    prompts, measured = [golden["input_ids"], golden["input_ids"], [5, 6, 7]], dataclasses.replace(GREEDY, logprobs=3)
    params = [GREEDY, dataclasses.replace(measured, prompt_logprobs=2), measured]
    tolerance = 4e-5 if golden["config"]["tie_word_embeddings"] else 1e-5  # logits spread by 4 then, and round likewise
    for number, (config, wanted) in enumerate(cases):
        folder = write_model(tmp_path / f"{number}", config, seed=golden["seed"], with_tokenizer=False)
        alone = run(folder, None, prompts, params)
        assert alone[0][0] == golden["greedy_ids"] or number
        for mesh in wanted:
            for one, other in zip(alone, run(folder, mesh, prompts, params), strict=True):
                assert one[0] == other[0]
                compare_logprobs(one[1], other[1], tolerance)
                compare_logprobs(one[2], other[2], tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [1, 2, 8])
def test_every_way_to_sample(kv_heads, tmp_path):
    """Four stages of one layer, and two of two over two devices each; 250 ids divide into none of them."""
    config = qwen3_config(num_attention_heads=8, num_key_value_heads=kv_heads, vocab_size=250, num_hidden_layers=4)
    folder = write_model(tmp_path / "m", config, seed=9, with_tokenizer=False)
    prompts = [[*range(20, 40), number] for number in range(len(PARAMS))]
    alone = run(folder, None, prompts, PARAMS)
    for mesh in ("data=2", "pipe=4", "pipe=2,tensor=2", "data=2,pipe=2,tensor=2"):
        for one, other in zip(alone, run(folder, mesh, prompts, PARAMS, max_num_seqs=5), strict=True):
            assert one[0] == other[0]
            compare_logprobs(one[1], other[1])
            compare_logprobs(one[2], other[2])


# -- where things lie ----------------------------------------------------------------------------


def load(folder, mesh: str | None, **settings) -> list[dict[tuple, jax.Array]]:
    """Each stage's parameters, by their paths in the whole model."""
    checkpoint = open_checkpoint(str(folder), settings.get("load_format", "auto"))
    loaded = []
    for cut in cut_stages(parse_config(checkpoint.config), resolve_mesh(mesh)):
        model = build_model(cut, "float32")
        weights = load_weights(EngineConfig(**settings), checkpoint, cut, model, jax.devices()[0])
        paths = [cut.path_in_model(path) for path, _ in nnx.to_flat_state(nnx.state(model))]
        loaded.append(dict(zip(paths, weights, strict=True)))
    return loaded


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_stages_have_their_layers_and_no_others(load_format, folder):
    """Three layers over two stages; the embedding is on both, since it is the head too."""
    first, last = load(folder, "pipe=2", load_format=load_format)
    [whole] = load(folder, None, load_format=load_format)
    assert {path[1] for path in first if path[0] == "layers"} == {0, 1}
    assert {path[1] for path in last if path[0] == "layers"} == {2}
    assert set(first) & set(last) == {("embed", "weight")}
    assert set(first) | set(last) == set(whole)
    for number, stage in enumerate((first, last)):
        for path, array in stage.items():
            np.testing.assert_array_equal(array, whole[path])
            assert array.devices() == {jax.devices()[number]}


@pytest.mark.slow
def test_orbax_is_restored_stage_by_stage(tmp_path):
    folder = write_model(tmp_path / "m", llama_config(), seed=1, with_tokenizer=False)
    [whole], checkpoint = load(folder, None), open_checkpoint(str(folder))
    save_orbax(tmp_path / "one", checkpoint, whole, checkpoint.config)
    stages = load(tmp_path / "one", "pipe=2,tensor=2")
    assert sum(map(len, stages)) == len(whole)
    for path, array in {**stages[0], **stages[1]}.items():
        assert len(array.devices()) == 2
        np.testing.assert_array_equal(np.asarray(array)[tuple(map(slice, whole[path].shape))], whole[path])


def test_the_pool_is_what_the_fullest_stage_can_hold(llm):
    """All stages have as many blocks; each has the caches of its own layers."""
    stages = llm.engine.runner.stages
    assert [len(stage.caches) for stage in stages] == [1, 2]
    assert {cache.shape[0] for stage in stages for pair in stage.caches for cache in pair} == {llm.config.num_blocks}
    assert [stage.features is None for stage in stages] == [True, False]
    assert llm.engine.num_devices == 2


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mesh": "pipe=4"}, "the model's num_layers, 3, are too few for pipe=4"),
        ({"mesh": "pipe=2", "pipe_layers": (1, 1)}, "pipe_layers 1,1 must be 2 numbers of at least 1 (pipe=2)"),
        ({"mesh": "pipe=2", "pipe_layers": (3,)}, "pipe_layers 3 must be 2 numbers"),
        ({"pipe_layers": (2, 1)}, "pipe_layers 2,1 must be 1 numbers"),
        ({"mesh": "pipe=2", "pipe_layers": (3, 0)}, "pipe_layers must be positive integers, one a stage, got (3, 0)"),
        ({"mesh": "pipe=2", "decode_steps": 4}, "decode_steps=4 is not possible with pipe=2: only 1 is"),
    ],
)
def test_what_is_refused(settings, message, folder):
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM(str(folder), **settings, **SETTINGS)
