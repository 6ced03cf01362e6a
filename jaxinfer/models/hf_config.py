"""Reads a Hugging Face `config.json`: every key is used, known to be harmless, or an error.

A key that this engine does not know may change the mathematics, so it is never ignored. `EngineConfig.hf_overrides`
is the way past a key that is known to be harmless.
"""

from __future__ import annotations

from typing import Any

from jaxinfer.config import ModelConfig, RopeConfig

HARMLESS = frozenset(
    [
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "attn_implementation",
        "bos_token_id",
        "chunk_size_feed_forward",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "experts_implementation",
        "finetuning_task",
        "head_dim",
        "hidden_dropout",
        "hidden_dropout_prob",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "is_llama_config",
        "label2id",
        "max_window_layers",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "unk_token_id",
        "use_cache",
        "vocab_size",
        "_attn_implementation_autoset",
    ]
)
"""Keys without influence on the logits of a decoder (dropout is off when inferring)."""

FIXED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "layer_types": (None,),
    "mlp_bias": (False,),
    "partial_rotary_factor": (1.0,),
    "pretraining_tp": (0, 1),
    "pruned_heads": ({},),
    "quantization_config": (None,),
    "rope_interleaved": (False,),
    "sliding_window": (None,),
    "use_sliding_window": (False,),
}
"""Keys that change the mathematics, with the values under which they do not."""


class ConfigReader:
    """A `config.json` whose keys are ticked off as they are read."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = config
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        value = self._config.get(key)
        return default if value is None else value

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"config.json has no {key}")
        return value

    def allow(self, key: str, *values: Any) -> None:
        """Accepts a key that the family reads otherwise, or that has one of these values."""
        if not values or self._config.get(key) in values:
            self._read.add(key)

    def finish(self) -> None:
        """Refuses what is left.

        Raises:
          ValueError: a key that would change the mathematics, or one that is not known.
        """
        for key in sorted(set(self._config) - self._read - HARMLESS):
            value = self._config[key]
            if key not in FIXED:
                raise ValueError(
                    f"config.json has {key}={value!r}, which this engine does not know; if it is harmless, "
                    f"remove it with hf_overrides={{{key!r}: None}}"
                )
            if value is not None and value not in FIXED[key]:
                raise ValueError(f"config.json has {key}={value!r}; only {FIXED[key][0]!r} is supported")


def read_rope(reader: ConfigReader, max_position: int) -> RopeConfig:
    """Rotary settings in either spelling: `rope_theta` with `rope_scaling`, or `rope_parameters`.

    Raises:
      ValueError: a RoPE type, or a setting of it, that is not supported.
    """
    parameters = dict(reader.get("rope_parameters") or {})
    scaling = dict(reader.get("rope_scaling") or {})
    theta = reader.get("rope_theta", parameters.pop("rope_theta", scaling.pop("rope_theta", 10000.0)))
    settings = {**parameters, **scaling}
    kind = settings.pop("rope_type", settings.pop("type", "default"))
    settings.pop("type", None)
    known = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
        "yarn": ("factor",),
    }
    optional = {"yarn": ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor")}
    if kind not in known:
        raise ValueError(f"RoPE type {kind!r} is not supported; supported are {', '.join(known)}")
    missing = [name for name in known[kind] if name not in settings]
    allowed = (*known[kind], *optional.get(kind, ()))
    unknown = [name for name in settings if name not in allowed and settings[name] is not None]
    if missing or (unknown and kind != "default"):
        raise ValueError(f"RoPE type {kind!r}: missing {missing}, unknown {unknown} in {settings}")
    rope = RopeConfig(
        theta=float(theta),
        kind=kind,
        factor=float(settings.get("factor", 1.0)),
        low_freq_factor=float(settings.get("low_freq_factor", 1.0)),
        high_freq_factor=float(settings.get("high_freq_factor", 4.0)),
        original_max_position=int(settings.get("original_max_position_embeddings", max_position)),
        beta_fast=float(settings.get("beta_fast") or 32.0),
        beta_slow=float(settings.get("beta_slow") or 1.0),
        attention_factor=None if settings.get("attention_factor") is None else float(settings["attention_factor"]),
        divisors=tuple(reader.get("rope_divisors", ())),
    )
    if rope.theta <= 0 or rope.factor <= 0:
        raise ValueError(f"RoPE theta and factor must be positive, got {rope.theta} and {rope.factor}")
    return rope


def ignore_unused_window(reader: ConfigReader) -> None:
    """Qwen's files name a `sliding_window` that means nothing while `use_sliding_window` is false.

    Raises:
      ValueError: `layer_types` with a window in it.
    """
    if not reader.get("use_sliding_window", False):
        reader.allow("sliding_window")
        kinds = set(reader.get("layer_types", ())) - {"full_attention"}
        if kinds:
            raise ValueError(f"config.json has layer_types {sorted(kinds)}; only full_attention is supported")
    else:
        raise ValueError("config.json has use_sliding_window=True; only False is supported")


def read_dense(reader: ConfigReader, architecture: str, **switches: Any) -> ModelConfig:
    """The keys that all dense families share; `switches` are the family's own fields of `ModelConfig`."""
    num_heads = int(reader.require("num_attention_heads"))
    hidden = int(reader.require("hidden_size"))
    max_position = int(reader.require("max_position_embeddings"))
    eos = reader.get("eos_token_id", ())
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": int(reader.require("vocab_size")),
        "hidden_size": hidden,
        "intermediate_size": int(reader.require("intermediate_size")),
        "num_layers": int(reader.require("num_hidden_layers")),
        "num_heads": num_heads,
        "num_kv_heads": int(reader.get("num_key_value_heads", num_heads)),
        "head_dim": int(reader.get("head_dim", hidden // num_heads)),
        "max_position_embeddings": max_position,
        "rms_norm_eps": float(reader.require("rms_norm_eps")),
        "rope": read_rope(reader, max_position),
        "tie_word_embeddings": bool(reader.get("tie_word_embeddings", False)),
        "dtype": str(reader.get("dtype", reader.get("torch_dtype", "float32"))),
        "eos_token_ids": (eos,) if isinstance(eos, int) else tuple(eos),
    }
    reader.finish()
    return ModelConfig(**{**fields, **switches})
