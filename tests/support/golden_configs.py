"""The tiny models of the goldens. Configurations are as on the Hub: RoPE keys at the top level."""

from typing import Any


def hub_config(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    """A tiny `config.json`; `changes` replace keys."""
    config: dict[str, Any] = {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 128,
        "max_position_embeddings": 512,
        "model_type": model_type,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": 256,
    }
    return config | changes


def llama_config(**changes: Any) -> dict[str, Any]:
    llama_keys = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None}
    return hub_config("LlamaForCausalLM", "llama", **(llama_keys | changes))


def qwen_config(architecture: str, model_type: str, **changes: Any) -> dict[str, Any]:
    qwen_keys = {"max_window_layers": 2, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0}
    no_window = {"sliding_window": None, "use_sliding_window": False}
    return hub_config(architecture, model_type, **(qwen_keys | no_window | changes))


def qwen3_config(**changes: Any) -> dict[str, Any]:
    qwen3_keys = {"attention_bias": False, "head_dim": 32, "num_key_value_heads": 2, "rope_scaling": None}
    return qwen_config("Qwen3ForCausalLM", "qwen3", **(qwen3_keys | changes))


LLAMA3_SCALING = {
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 32,
    "rope_type": "llama3",
}
YARN_SCALING = {"factor": 4.0, "original_max_position_embeddings": 32, "rope_type": "yarn"}

TINY_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2_mha": ("Llama 2: as many key as query heads, untied head", llama_config()),
    "llama3_gqa": (
        "Llama 3: 4 query heads a key head, a vocabulary no power of two divides",
        llama_config(num_attention_heads=8, num_key_value_heads=2, rope_theta=500000.0, vocab_size=250),
    ),
    "llama31_rope": (
        "Llama 3.1: frequencies kept, blended and divided by wavelength; explicit head_dim",
        llama_config(
            head_dim=32,
            max_position_embeddings=256,
            num_key_value_heads=2,
            rope_scaling=LLAMA3_SCALING,
            rope_theta=500000.0,
        ),
    ),
    "llama_tied_smollm": (
        "SmolLM2 scaled down: 9 query heads on 3 key heads, tied head, 3 layers",
        llama_config(
            hidden_size=72,
            num_attention_heads=9,
            num_hidden_layers=3,
            num_key_value_heads=3,
            rope_theta=100000.0,
            tie_word_embeddings=True,
        ),
    ),
    "llama_linear_rope": (
        "Linear position interpolation, in the old spelling `type`",
        llama_config(rope_scaling={"factor": 4.0, "type": "linear"}),
    ),
    "llama_yarn_rope": (
        "YaRN: blended frequencies and scaled cos and sin; explicit head_dim",
        llama_config(head_dim=32, max_position_embeddings=128, num_key_value_heads=2, rope_scaling=YARN_SCALING),
    ),
    "qwen3_gqa": ("Qwen3: normalised queries and keys, head_dim apart from hidden/heads", qwen3_config()),
    "qwen3_tied": (
        "Qwen3, tied head, 3 layers",
        qwen3_config(num_hidden_layers=3, max_window_layers=3, tie_word_embeddings=True),
    ),
    "qwen2_bias": (
        "Qwen2: biases on queries, keys and values, tied head",
        qwen_config("Qwen2ForCausalLM", "qwen2", num_key_value_heads=2, tie_word_embeddings=True),
    ),
    "mistral": (
        "Mistral (Nemo): no sliding window, head_dim apart from hidden/heads",
        hub_config(
            "MistralForCausalLM",
            "mistral",
            head_dim=32,
            num_key_value_heads=1,
            rope_theta=1000000.0,
            sliding_window=None,
        ),
    ),
}
