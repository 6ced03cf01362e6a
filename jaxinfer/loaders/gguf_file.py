"""A GGUF file, dequantised through the `gguf` package and presented with Hugging Face's names.

llama.cpp stores the query and key rows of the llama architecture for interleaved rotation; they are put back into the
rotate-half order here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from jaxinfer.loaders.checkpoint import Index

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
BLOCK = re.compile(r"blk\.(\d+)\.(.+)")


def hf_name(name: str) -> str:
    """GGUF tensor name -> Hugging Face's; unknown ones keep theirs, to be refused by name."""
    match = BLOCK.fullmatch(name)
    stem, _, suffix = (match[2] if match else name).rpartition(".")
    if stem not in NAMES:
        return name
    return (f"model.layers.{match[1]}." if match else "") + f"{NAMES[stem]}.{suffix}"


class _PlainReader(gguf.GGUFReader):
    """Keeps the mapped file as a plain array: a slice of a `np.memmap` costs several times as much, and the reader
    takes hundreds of thousands, one a token.
    """

    @property
    def data(self) -> np.ndarray:
        return self._plain

    @data.setter
    def data(self, value: np.ndarray) -> None:
        self._plain = value.view(np.ndarray)


class GGUFFile:
    """See `Checkpoint`.

    Raises:
      ValueError: not a GGUF file, truncated, or of an architecture that is not supported.
    """

    generation_config: dict[str, Any]

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        try:
            reader = _PlainReader(path)
            self._fields = {name: field.contents() for name, field in reader.fields.items()}
        except Exception as error:  # the package raises whatever numpy or struct did
            raise ValueError(f"{path} is truncated or not a GGUF file: {error}") from None
        self._tensors = {hf_name(tensor.name): tensor for tensor in reader.tensors}
        self._divisors = self._tensors.pop("rope_freqs.weight", None)
        self.generation_config = {}
        self.config = self._read_config()
        self.tokenizer_data = {
            name.removeprefix("tokenizer."): value
            for name, value in self._fields.items()
            if name.startswith("tokenizer.")
        }

    def _read_config(self) -> dict[str, Any]:
        architecture = self._fields.get("general.architecture")
        if architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise ValueError(f"{self.path}: GGUF architecture {architecture!r} is not supported; supported are {known}")
        self._architecture = str(architecture)
        heads = self._field("attention.head_count")
        hidden = self._field("embedding_length")
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[self._architecture]],
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "hidden_size": hidden,
            "intermediate_size": self._field("feed_forward_length"),
            "num_hidden_layers": self._field("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._field("attention.head_count_kv", heads),
            "head_dim": self._field("attention.key_length", hidden // heads),
            "max_position_embeddings": self._field("context_length"),
            "rms_norm_eps": self._field("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._field("rope.freq_base", 10000.0),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "eos_token_id": self._fields.get("tokenizer.ggml.eos_token_id"),
        }
        rotated = self._field("rope.dimension_count", config["head_dim"])
        if rotated != config["head_dim"]:
            raise ValueError(
                f"{self.path}: rotates {rotated} of {config['head_dim']} components; only all is supported"
            )
        scaling = self._field("rope.scaling.type", "none")
        if scaling != "none":
            config["rope_scaling"] = {"rope_type": scaling, "factor": self._field("rope.scaling.factor")}
        if self._divisors is not None:
            config["rope_divisors"] = self._divisors.data.astype(np.float32).tolist()
        return config

    def _field(self, name: str, default: Any = None) -> Any:
        value = self._fields.get(f"{self._architecture}.{name}", default)
        if value is None:
            raise ValueError(f"{self.path}: metadata {self._architecture}.{name} is missing")
        return value

    def tensor_names(self) -> Iterable[str]:
        return self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._tensors:
            raise ValueError(f"{self.path}: tensor {name} is missing")
        return tuple(int(size) for size in reversed(self._tensors[name].shape))

    def read(self, name: str, index: Index) -> np.ndarray:
        """Only the rows of the first dimension that are asked for are dequantised."""
        tensor, shape = self._tensors[name], self.shape(name)
        if len(shape) == 1:
            return gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shape)[index]
        first, *others = index
        if self._architecture != "llama" or not name.endswith((".q_proj.weight", ".k_proj.weight")):
            return self._dequantize(name, first)[(slice(None), *others)]
        head = shape[0] // self.config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
        start, stop = first.start // head, -(-first.stop // head)
        values = _rotate_half_order(self._dequantize(name, slice(start * head, stop * head)), stop - start)
        return values[(slice(first.start - start * head, first.stop - start * head), *others)]

    def _dequantize(self, name: str, rows: slice) -> np.ndarray:
        """Rows of a matrix; a row is whole blocks of the quantisation."""
        tensor, shape = self._tensors[name], self.shape(name)
        data = tensor.data.reshape(shape[0], -1)[rows]
        return gguf.dequantize(data, tensor.tensor_type).reshape(-1, *shape[1:])


def _rotate_half_order(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head from (0, h, 1, h + 1, ...) to (0, 1, ..., h, h + 1, ...), h half the head."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
