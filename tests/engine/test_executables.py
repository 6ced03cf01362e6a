"""Compiled programs are found again, give the same tokens, and a damaged or foreign file is compiled anew."""

from __future__ import annotations

import jax
import pytest
from tiny_models import write_model

from jaxinfer import LLM, SamplingParams
from jaxinfer.engine import executables
from jaxinfer.engine.executables import ExecutableCache

PARAMS = [SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), SamplingParams(seed=3, top_k=4, logprobs=2)]


def run(folder, saved):
    """Tokens of a plain and a full request, with every program that the first step finds in `saved`."""
    with LLM(str(folder), num_blocks=20, block_size=16, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16,
             compile_cache=None) as llm:  # fmt: skip
        programs = llm.engine.runner.programs
        programs.saved = ExecutableCache(saved, (programs.shapes,), jax.devices()[0])
        llm.engine.runner.warm_up(programs.keys(llm.engine.runner.ladder.shapes), 1)
        outputs = llm.generate([[1, 2, 3], [7, 8]], PARAMS)
        return [output.outputs[0].token_ids for output in outputs], programs.saved.num_loaded, programs.stats


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("saved") / "model", seed=4)


def test_every_program_is_found_again(folder, tmp_path):
    first, loaded, stats = run(folder, tmp_path / "programs")
    assert loaded == 0
    assert len(list((tmp_path / "programs").iterdir())) == stats.num_programs
    again, loaded, stats = run(folder, tmp_path / "programs")
    assert again == first
    assert loaded == stats.num_programs

    for path in (tmp_path / "programs").iterdir():
        path.write_bytes(path.read_bytes()[:100])  # a disk that was full
    again, loaded, _ = run(folder, tmp_path / "programs")
    assert (again, loaded) == (first, 0)


def test_other_ingredients_are_other_programs(tmp_path):
    device, argument = jax.devices()[0], jax.ShapeDtypeStruct((4,), "float32")
    compiled = jax.jit(lambda x: x + 1).lower(argument).compile()
    ExecutableCache(tmp_path, ("a",), device).store("add", compiled, argument)
    assert ExecutableCache(tmp_path, ("a",), device).load("add", (argument,), argument) is not None
    assert ExecutableCache(tmp_path, ("b",), device).load("add", (argument,), argument) is None
    assert ExecutableCache(tmp_path, ("a",), device).load("sub", (argument,), argument) is None


def test_the_folder_stays_within_its_size(tmp_path, monkeypatch):
    device, argument = jax.devices()[0], jax.ShapeDtypeStruct((4,), "float32")
    compiled = jax.jit(lambda x: x + 2).lower(argument).compile()
    cache = ExecutableCache(tmp_path, (), device)
    cache.store("first", compiled, argument)
    size = next(tmp_path.iterdir()).stat().st_size
    monkeypatch.setattr(executables, "MOST_BYTES", 3 * size + size // 2)
    for number in range(6):
        cache.store(str(number), compiled, argument)
    assert len(list(tmp_path.iterdir())) == 3
    assert cache.load("5", (argument,), argument) is not None
    assert cache.load("first", (argument,), argument) is None


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path):
    (tmp_path / "file").write_text("")
    argument = jax.ShapeDtypeStruct((4,), "float32")
    cache = ExecutableCache(tmp_path / "file" / "below", (), jax.devices()[0])
    cache.store("add", jax.jit(lambda x: x + 1).lower(argument).compile(), argument)
    assert cache.load("add", (argument,), argument) is None
