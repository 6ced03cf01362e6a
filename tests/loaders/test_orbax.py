"""Converting to Orbax and loading it gives the same bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from golden_configs import qwen3_config
from tiny_models import write_model

from jaxinfer import LLM, SamplingParams
from jaxinfer.config import EngineConfig
from jaxinfer.engine.build import load_weights
from jaxinfer.loaders import open_checkpoint
from jaxinfer.models import build_model, parse_config

SCRIPT = Path(__file__).parents[2] / "scripts" / "convert_checkpoint.py"
SETTINGS = {"max_num_seqs": 2, "num_blocks": 40, "compile_cache": None}


def convert(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, check=False)


def parameters(folder: str, dtype: str) -> list[jax.Array]:
    checkpoint = open_checkpoint(folder)
    config = parse_config(checkpoint.config)
    return load_weights(EngineConfig(), checkpoint, config, build_model(config, dtype), jax.devices()[0])


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_the_same_bits_and_answers(tmp_path, dtype):
    source = write_model(tmp_path / "m", seed=2)
    (source / "generation_config.json").write_text('{"eos_token_id": [7], "temperature": 0.5}')
    result = convert(source, tmp_path / "out", "--dtype", dtype)
    assert result.returncode == 0, result.stderr
    for one, other in zip(parameters(str(source), dtype), parameters(str(tmp_path / "out"), dtype), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(other).view(np.uint8))
    answers = []
    for folder in (source, tmp_path / "out"):
        with LLM(str(folder), dtype=dtype, **SETTINGS) as llm:
            assert llm.get_default_sampling_params().temperature == 0.5
            answers.append(llm.chat([{"role": "user", "content": "hi"}], SamplingParams(seed=1))[0].outputs[0])
    assert answers[0] == answers[1]


@pytest.mark.slow
def test_over_a_mesh_the_same_is_written(tmp_path, monkeypatch):
    """Stages, heads that lie twice and a padded vocabulary leave no trace."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    changes = {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 260, "tie_word_embeddings": True}
    source = write_model(tmp_path / "m", qwen3_config(**changes), seed=2)
    for mesh in ("tensor=1", "pipe=2,tensor=4"):
        result = convert(source, tmp_path / mesh, "--mesh", mesh)
        assert result.returncode == 0, result.stderr
    written = (parameters(str(tmp_path / mesh), "float32") for mesh in ("tensor=1", "pipe=2,tensor=4"))
    for one, other, first in zip(*written, parameters(str(source), "float32"), strict=True):
        np.testing.assert_array_equal(one, first)
        np.testing.assert_array_equal(other, first)


@pytest.mark.slow
def test_gguf_converts_with_its_tokenizer(tmp_path):
    """The embedded model: the same bits as from the GGUF, and the same ids."""
    assert convert("smollm2", tmp_path / "out", "--dtype", "float32").returncode == 0
    for one, other in zip(parameters("smollm2", "float32"), parameters(str(tmp_path / "out"), "float32"), strict=True):
        np.testing.assert_array_equal(one, other)
    from jaxinfer.tokenizer import load_tokenizer, tokenizer_from_gguf

    data = open_checkpoint("smollm2").tokenizer_data
    assert data is not None
    loaded, rebuilt = load_tokenizer(tmp_path / "out"), tokenizer_from_gguf(data)
    text = "Hello 123 <|im_start|>world\n"
    assert loaded.encode(text) == rebuilt.encode(text)
    assert (loaded.chat_template, loaded.eos_token_ids) == (rebuilt.chat_template, rebuilt.eos_token_ids)


def test_mistakes(tmp_path):
    source = write_model(tmp_path / "m")
    result = convert(source, source)
    assert result.returncode == 2
    assert "is not empty" in result.stderr
    assert convert("/nonexistent", tmp_path / "x").returncode == 2
    with pytest.raises(ValueError, match=r"has no Orbax checkpoint; scripts/convert_checkpoint.py writes one"):
        LLM(str(source), load_format="orbax")
    assert convert(source, tmp_path / "out").returncode == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(ValueError, match=r"down has shape \(128, 64\), expected \(64, 64\)"):
        LLM(str(tmp_path / "out"), **SETTINGS)
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ValueError, match=r"parameter layers.2.* is missing"):
        LLM(str(tmp_path / "out"), **SETTINGS)
    (tmp_path / "out" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(ValueError, match=r"parameter layers.1.* has no place"):
        LLM(str(tmp_path / "out"), **SETTINGS)
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    for file in (tmp_path / "out" / "orbax").rglob("*"):
        if file.is_file() and file.stat().st_size > 1000:
            file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read"):
        LLM(str(tmp_path / "out"), **SETTINGS)


def test_hub_ids_that_are_not_to_be_had():
    with pytest.raises(
        ValueError, match="model 'nobody/nothing': no such file or folder, and the Hub does not give it"
    ):
        open_checkpoint("nobody/nothing")


def test_a_cached_hub_id_is_found(tmp_path, monkeypatch):
    source = write_model(tmp_path / "m")
    import huggingface_hub

    calls = []

    def snapshot(name, allow_patterns, local_files_only=False):
        calls.append((name, tuple(allow_patterns), local_files_only))
        return str(source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert open_checkpoint("some/model").config["hidden_size"] == 64
    assert calls == [("some/model", ("*.safetensors", "*.json", "*.jinja"), True)]
    (source / "model.safetensors").rename(tmp_path / "elsewhere")  # a part only: fetch the rest
    with pytest.raises(ValueError, match="has no"):
        open_checkpoint("some/model")
    assert [call[2] for call in calls] == [True, True, False]
