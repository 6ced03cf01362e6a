"""Random weights for tiny models, rebuilt from a seed instead of stored.

The goldens under `tests/goldens/tiny` hold a HuggingFace `config.json`, a seed and what transformers
computed. Tests call `make_state_dict(config, seed)` to get the very weights transformers ran on, so that no
weights are committed. Each golden also holds `state_dict_sha256` of them: if NumPy ever changed its stream of
normals, that one digest would say so, rather than every logit.

Pure NumPy: neither torch nor jax.
"""

import hashlib
import math
import zlib
from typing import Any

import numpy as np

# Matrices keep the scale of what flows through them, times a gain above one so that logits are well spread.
MATRIX_GAIN = 1.25
EMBEDDING_STD = 0.5
NORM_STD = 0.2
BIAS_STD = 0.2

# Architecture -> which projections have a bias, and whether queries and keys are normalised per head.
_QKV_BIAS = {
    "LlamaForCausalLM": False,
    "MistralForCausalLM": False,
    "Qwen2ForCausalLM": True,
    "Qwen3ForCausalLM": False,
}
_QK_NORM = {"Qwen3ForCausalLM"}


def parameter_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors, in the layout of the Hub: linear weights are `[out, in]`.

    `config` is a HuggingFace `config.json`. A tied head has no `lm_head.weight`.

    Raises `NotImplementedError` for an architecture, or a bias switch, that no golden covers.
    """
    architecture = _architecture(config)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, shape in _layer_shapes(config, architecture).items():
            shapes[f"model.layers.{layer}.{name}"] = shape
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings", False):
        shapes["lm_head.weight"] = (vocab, hidden)
    return shapes


def make_state_dict(config: dict[str, Any], seed: int) -> dict[str, np.ndarray]:
    """HuggingFace-named float32 weights of a random model; the same bits for the same `config` and `seed`.

    Every tensor has a generator of its own, seeded by `(seed, crc32(name))`, so neither the order nor the
    presence of other tensors changes it. Shapes are those of `parameter_shapes`.
    """
    return {name: _random_tensor(name, shape, seed) for name, shape in parameter_shapes(config).items()}


def state_dict_sha256(state_dict: dict[str, np.ndarray]) -> str:
    """Hex digest over names, shapes and little-endian float32 bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(state_dict):
        tensor = np.ascontiguousarray(state_dict[name], dtype="<f4")
        digest.update(f"{name}{list(tensor.shape)}".encode())
        digest.update(tensor.tobytes())
    return digest.hexdigest()


def _architecture(config: dict[str, Any]) -> str:
    (architecture,) = config["architectures"]
    if architecture not in _QKV_BIAS:
        raise NotImplementedError(f"no golden weights for architecture {architecture!r}")
    for switch in ("attention_bias", "mlp_bias"):
        if config.get(switch, False):
            raise NotImplementedError(f"no golden weights for {architecture} with {switch}")
    return architecture


def _layer_shapes(config: dict[str, Any], architecture: str) -> dict[str, tuple[int, ...]]:
    """Tensors of one decoder layer, by their names after `model.layers.N.`."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // num_heads
    widths = {
        "q_proj": num_heads * head_dim,
        "k_proj": num_kv_heads * head_dim,
        "v_proj": num_kv_heads * head_dim,
    }
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    for projection, width in widths.items():
        shapes[f"self_attn.{projection}.weight"] = (width, hidden)
        if _QKV_BIAS[architecture]:
            shapes[f"self_attn.{projection}.bias"] = (width,)
    shapes["self_attn.o_proj.weight"] = (hidden, num_heads * head_dim)
    if architecture in _QK_NORM:
        shapes["self_attn.q_norm.weight"] = (head_dim,)
        shapes["self_attn.k_norm.weight"] = (head_dim,)
    shapes["post_attention_layernorm.weight"] = (hidden,)
    shapes["mlp.gate_proj.weight"] = (intermediate, hidden)
    shapes["mlp.up_proj.weight"] = (intermediate, hidden)
    shapes["mlp.down_proj.weight"] = (hidden, intermediate)
    return shapes


def _random_tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """One float32 tensor; scaled in float64 and rounded once, so the result is the same everywhere."""
    generator = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    normal = generator.standard_normal(shape)
    if name.endswith(".bias"):
        values = BIAS_STD * normal
    elif len(shape) == 1:
        values = 1.0 + NORM_STD * normal
    elif "embed_tokens" in name:
        values = EMBEDDING_STD * normal
    else:
        values = MATRIX_GAIN / math.sqrt(shape[1]) * normal
    return values.astype(np.float32)
