"""Compiled programs are found again by a new process, and a damaged or foreign file is compiled anew.

Loading is tried in processes of their own: a CPU program that is loaded beside many others may lack its functions
(jax 0.11.2), which is one reason why engines on a CPU leave this to jax's own cache.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
from tiny_models import write_model

from jaxinfer.engine import executables
from jaxinfer.engine.executables import ExecutableCache

SCRIPT = """
import json, sys
from pathlib import Path
import jax
from jaxinfer import LLM, SamplingParams
from jaxinfer.engine.executables import ExecutableCache

params = [SamplingParams(temperature=0, max_tokens=5, ignore_eos=True), SamplingParams(seed=3, top_k=4, logprobs=2)]
with LLM(sys.argv[1], num_blocks=20, block_size=16, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16,
         compile_cache=None) as llm:
    programs, ladder = llm.engine.runner.programs, llm.engine.runner.ladder
    programs.saved = ExecutableCache(Path(sys.argv[2]), (programs.shapes,), jax.devices()[0])
    llm.engine.runner.warm_up(programs.keys(ladder.shapes), 1)
    tokens = [output.outputs[0].token_ids for output in llm.generate([[1, 2, 3], [7, 8]], params)]
print(json.dumps([tokens, programs.saved.num_loaded, programs.stats.num_programs]))
"""


@pytest.mark.slow
def test_every_program_is_found_again(tmp_path):
    folder, saved = write_model(tmp_path / "model", seed=4), tmp_path / "programs"

    def run():
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder), str(saved)]
        environment = {**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "0"}  # whose programs cannot all be stored again
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
        return json.loads(done.stdout)

    first, loaded, num_programs = run()
    assert loaded == 0
    assert len(list(saved.iterdir())) == num_programs
    assert run() == [first, num_programs, num_programs]
    for path in saved.iterdir():
        path.write_bytes(path.read_bytes()[:100])  # a disk that was full
    assert run() == [first, 0, num_programs]


@pytest.fixture
def fake(monkeypatch):
    """Serialises the program's name alone."""

    def load(data, in_tree, out_tree, execution_devices):
        if data != b"program":
            raise ValueError("not a program")
        return "loaded"

    serializer = SimpleNamespace(
        serialize=lambda compiled: (b"program", None, jax.tree.structure(0)), deserialize_and_load=load
    )
    monkeypatch.setattr(executables, "serialize_executable", serializer)


def test_other_ingredients_are_other_programs(tmp_path, fake):
    device = jax.devices()[0]
    ExecutableCache(tmp_path, ("a",), device).store("add", None, 0)
    cache = ExecutableCache(tmp_path, ("a",), device)
    assert cache.load("add", (0,), 0) == "loaded"
    assert cache.num_loaded == 1
    assert ExecutableCache(tmp_path, ("b",), device).load("add", (0,), 0) is None
    assert cache.load("sub", (0,), 0) is None
    for path in tmp_path.iterdir():
        path.write_bytes(b"prog")
    assert cache.load("add", (0,), 0) is None


def test_the_folder_stays_within_its_size(tmp_path, fake, monkeypatch):
    cache = ExecutableCache(tmp_path, (), jax.devices()[0])
    monkeypatch.setattr(executables, "MOST_BYTES", 3 * len(b"program") + 2)
    for number in range(6):
        cache.store(str(number), None, 0)
    assert len(list(tmp_path.iterdir())) == 3
    assert cache.load("5", (0,), 0) == "loaded"
    assert cache.load("0", (0,), 0) is None


def test_files_that_others_take_away_meanwhile_do_no_harm(tmp_path, fake, caplog):
    caplog.set_level(logging.INFO, "jaxinfer")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")  # is listed, and is not there
    cache = ExecutableCache(tmp_path, (), jax.devices()[0])
    cache.store("add", None, 0)
    assert cache.load("add", (0,), 0) == "loaded"
    assert not caplog.messages


def test_a_folder_that_cannot_be_written_does_no_harm(tmp_path, fake):
    (tmp_path / "file").write_text("")
    cache = ExecutableCache(tmp_path / "file" / "below", (), jax.devices()[0])
    cache.store("add", None, 0)
    assert cache.load("add", (0,), 0) is None


def test_results_have_the_structure_that_is_said(tmp_path, fake):
    with pytest.raises(AssertionError, match="add returns"):
        ExecutableCache(tmp_path, (), jax.devices()[0]).store("add", None, (0, 0))


def test_the_source_is_part_of_the_key(monkeypatch, tmp_path):
    before = executables.source_digest()
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "executables.py").write_text("")
    monkeypatch.setattr(executables, "__file__", str(tmp_path / "engine" / "executables.py"))
    other = executables.source_digest()
    (tmp_path / "tuned.json").write_text("{}")
    assert len({before, other, executables.source_digest()}) == 3
