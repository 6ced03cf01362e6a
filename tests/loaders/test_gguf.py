"""GGUF files written here from golden weights: the same logits as the safetensors they came from."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from golden_cases import TOLERANCE, forward, read
from golden_weights import make_state_dict

from jaxinfer.loaders import gguf_file, open_checkpoint

GGUF_NAMES = {hf: name for name, hf in gguf_file.NAMES.items()}


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of query and key rows."""
    rows, columns = values.shape
    return values.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def gguf_name(name: str) -> str:
    stem, _, suffix = name.rpartition(".")
    if not stem.startswith("model.layers."):
        return f"{GGUF_NAMES[stem]}.{suffix}"
    _, _, number, rest = stem.split(".", 3)
    return f"blk.{number}.{GGUF_NAMES[rest]}.{suffix}"


def write(path: Path, architecture: str, golden: dict, kind: gguf.GGMLQuantizationType, divisors=None) -> Path:
    config = golden["config"]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    head_dim = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
    writer.add_key_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"<{number}>" for number in range(config["vocab_size"])])
    writer.add_token_merges([])
    for name, values in make_state_dict(config, golden["seed"]).items():
        if architecture == "llama" and ".q_proj" in name:
            values = interleave(values, config["num_attention_heads"])
        if architecture == "llama" and ".k_proj" in name:
            values = interleave(values, config["num_key_value_heads"])
        plain = values.ndim == 1 or kind == gguf.GGMLQuantizationType.F32
        stored = values if plain else gguf.quantize(values, kind)
        writer.add_tensor(gguf_name(name), stored, raw_dtype=gguf.GGMLQuantizationType.F32 if plain else kind)
    if divisors is not None:
        writer.add_tensor("rope_freqs.weight", divisors.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(("name", "architecture"), [
    ("llama3_gqa", "llama"), ("llama_tied_smollm", "llama"), ("qwen3_gqa", "qwen3"), ("qwen3_tied", "qwen3"),
    ("qwen2_bias", "qwen2"),
])  # fmt: skip
def test_float_gguf_equals_transformers(tmp_path, name, architecture):
    golden, arrays = read(name)
    path = write(tmp_path / "m.gguf", architecture, golden, gguf.GGMLQuantizationType.F32)
    np.testing.assert_allclose(forward(path, golden["input_ids"]), arrays["logits"], atol=TOLERANCE, rtol=0)


def test_llama31_frequencies_come_as_divisors(tmp_path):
    golden, arrays = read("llama31_rope")
    base = 1.0 / golden["config"]["rope_theta"] ** (np.arange(0, 32, 2) / 32)
    path = write(tmp_path / "m.gguf", "llama", golden, gguf.GGMLQuantizationType.F32, base / arrays["inv_freq"])
    np.testing.assert_allclose(forward(path, golden["input_ids"]), arrays["logits"], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "F16", "BF16"])
def test_quantised_tensors_are_what_the_package_says(tmp_path, kind):
    golden, _ = read("qwen3_gqa")
    wanted = gguf.GGMLQuantizationType[kind]
    checkpoint = open_checkpoint(str(write(tmp_path / "m.gguf", "qwen3", golden, wanted)))
    for name, values in make_state_dict(golden["config"], golden["seed"]).items():
        expected = values if values.ndim == 1 else gguf.dequantize(gguf.quantize(values, wanted), wanted)
        whole = tuple(slice(0, size) for size in checkpoint.shape(name))
        np.testing.assert_array_equal(checkpoint.read(name, whole), expected)


@pytest.mark.parametrize(("kind", "architecture"), [("F32", "llama"), ("Q8_0", "llama"), ("Q4_1", "qwen3")])
def test_a_part_is_read_as_a_part_of_the_whole(tmp_path, kind, architecture):
    """Also rows that begin and end inside a head whose rows llama.cpp has in another order."""
    golden, _ = read("llama31_rope")
    wanted = gguf.GGMLQuantizationType[kind]
    checkpoint = open_checkpoint(str(write(tmp_path / "m.gguf", architecture, golden, wanted)))
    for name in checkpoint.tensor_names():
        shape = checkpoint.shape(name)
        whole = checkpoint.read(name, tuple(slice(0, size) for size in shape))
        for first, last in ((0, 1), (5, shape[0] - 3), (shape[0] // 2, shape[0])):
            index = (slice(first, last), *(slice(3, size - 1) for size in shape[1:]))
            np.testing.assert_array_equal(checkpoint.read(name, index), whole[index])


def test_other_architectures_and_missing_metadata(tmp_path):
    golden, _ = read("qwen3_gqa")
    kind = gguf.GGMLQuantizationType.F32
    with pytest.raises(
        ValueError, match="GGUF architecture 'gemma' is not supported; supported are llama, qwen2, qwen3"
    ):
        open_checkpoint(str(write(tmp_path / "a.gguf", "gemma", golden, kind)))
    write(tmp_path / "b.gguf", "qwen3", golden, kind)
    with pytest.raises(ValueError, match=r"has 2 .gguf files"):
        open_checkpoint(str(tmp_path))
    (tmp_path / "a.gguf").unlink()
    assert open_checkpoint(str(tmp_path)).config["hidden_size"] == golden["config"]["hidden_size"]
