"""Tiny models on disk, with a tokenizer whose tokens are the 256 bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from golden_weights import make_state_dict
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from jaxinfer import LLM
from jaxinfer.cache import KVCacheManager

VOCAB = 260
BOS, EOS, USER, END = 256, 257, 258, 259

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "vocab_size": VOCAB,
    "eos_token_id": EOS,
}

SETTINGS: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "block_size": 16,
    "num_blocks": 400,
    "max_model_len": 2048,
    "compile_cache": None,
    "dtype": "float32",
}
"""Of most engines. Programs depend on sizes alone, so that those of equal sizes are compiled once in a run."""
ODD_BUDGET = {**SETTINGS, "max_num_batched_tokens": 37}
"""Chunks of prompts end within blocks."""


def shrink_pool(llm: LLM, num_blocks: int) -> None:
    """Leaves a fresh engine the first blocks of its pool, the null block included: programs stay those of the whole."""
    engine = llm.engine
    whole = engine._cache
    assert num_blocks <= whole.pool.num_blocks
    cache = KVCacheManager(num_blocks, whole.block_size, enable_prefix_caching=whole.enable_prefix_caching)
    engine._cache = engine._scheduler.cache = cache


def byte_tokenizer() -> Tokenizer:
    """Byte-level BPE without merges: ids 0 to 255 are bytes (in GPT-2's order of characters), then four specials."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = ["<bos>", "<eos>", "<user>", "<end>"]
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    return tokenizer


def write_tokenizer(folder: Path) -> None:
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": "{{ bos_token }}{% for m in messages %}<user>{{ m['content'] }}<end>{% endfor %}",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_model(
    folder: Path,
    config: dict[str, Any] | None = None,
    *,
    seed: int = 0,
    state: dict[str, np.ndarray] | None = None,
    with_tokenizer: bool = True,
    **changes: Any,
) -> Path:
    """A model folder as the Hub lays it out; `changes` are keys of config.json (None removes one)."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = {**(config or CONFIG), **changes}
    merged = {key: value for key, value in merged.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(merged))
    save_file(state if state is not None else make_state_dict(merged, seed), folder / "model.safetensors")
    if with_tokenizer:
        write_tokenizer(folder)
    return folder
