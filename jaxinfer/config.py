"""What a user may set, and what a model is. Frozen dataclasses; "auto" is resolved by one pure function."""

from __future__ import annotations

import dataclasses
import difflib
from dataclasses import dataclass, field
from typing import Any, Self

DTYPES = ("float32", "bfloat16", "float16")
KV_CACHE_DTYPES = ("auto", *DTYPES, "fp8", "fp8_e4m3")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "orbax", "dummy")
KERNELS = ("auto", "reference")
WARMUPS = ("auto", "full", "lazy")

VLLM_ALIASES = {
    "gpu_memory_utilization": "memory_utilization",
    "num_gpu_blocks_override": "num_blocks",
    "scheduling_policy": "policy",
}
"""vLLM's names for fields of `EngineConfig`."""

VLLM_MESH_AXES = {
    "tensor_parallel_size": "tensor",
    "pipeline_parallel_size": "pipe",
    "data_parallel_size": "data",
}
"""vLLM's arguments that are sizes of mesh axes here."""

VLLM_FIXED = {
    "enforce_eager": False,
    "trust_remote_code": False,
    "quantization": None,
    "swap_space": 0,
    "cpu_offload_gb": 0,
    "enable_chunked_prefill": True,
    "enable_lora": False,
    "speculative_config": None,
    "revision": None,
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "disable_log_stats": True,
}
"""vLLM's arguments with the one value that means what this engine does; any other is refused by name."""


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary embedding. `kind` is "default", "linear", "llama3" or "yarn"; lengths are in tokens.

    `divisors` are per-frequency divisors that a GGUF file states instead of the llama3 parameters.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # of YaRN; None is 0.1 ln(factor) + 1
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A dense decoder-only model's dimensions and switches, whatever file they came from."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    dtype: str = "bfloat16"  # of the checkpoint
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads",
                     "head_dim", "max_position_embeddings"):  # fmt: skip
            if getattr(self, name) < 1:
                raise ValueError(f"the model's {name} must be positive, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot be divided among {self.num_kv_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise ValueError(f"rotary embedding needs an even head_dim, got {self.head_dim}")

    @property
    def group_size(self) -> int:
        """Query heads a key-value head."""
        return self.num_heads // self.num_kv_heads

    def kv_bytes_per_token(self, itemsize: int) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize


@dataclass(frozen=True)
class Kernels:
    """The implementation of each kernel that an engine chose when it started."""

    attention: str = "reference"
    kv_update: str = "reference"
    linear: str = "reference"
    sampling: str = "reference"
    all_reduce: str = "psum"  # XLA's, which is none on one device

    @classmethod
    def all(cls, name: str) -> Self:
        """One implementation for all that one device does."""
        return cls(name, name, name, name)

    def __str__(self) -> str:
        """Attention's, and those that differ from it."""
        others = {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}
        first = others.pop("attention")
        if self.all_reduce == "psum":
            del others["all_reduce"]
        return ", ".join([first, *(f"{name} {value}" for name, value in others.items() if value != first)])


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything that is set once for an engine. None and "auto" are filled in by `resolve`.

    Args:
      model: a folder with safetensors or Orbax, a GGUF file, a Hub id, or "smollm2" (the embedded default model).
      tokenizer: a folder or `tokenizer.json`; None takes the model's.
      dtype: of weights and activations: "auto", "float32", "bfloat16", "float16".
      kv_cache_dtype: of the KV cache: "auto" is `dtype`; "fp8" and "fp8_e4m3" store K and V as they are in eight bits.
      load_format: "auto", "safetensors", "gguf", "orbax", or "dummy" (random weights from `seed`).
      seed: for dummy weights and for the seeds of requests that bring none.
      max_model_len: longest prompt plus output; None takes what model and pool allow.
      max_num_seqs: requests that run at once.
      max_num_batched_tokens: tokens a step computes at most.
      long_prefill_token_threshold: what counts as a long prompt in the fairness rule; None is a quarter of the
        budget.
      block_size: tokens a KV-cache block.
      num_blocks: blocks of the KV cache, the reserved null block included; None sizes it from free memory.
      memory_utilization: the share of device memory that weights, temporaries and cache may take together.
      enable_prefix_caching: reuse K and V of equal prefixes.
      kernels: "auto", or "reference" for plain jnp everywhere.
      policy: "fcfs" or "priority".
      depth: steps in flight: 1 is synchronous, 2 plans a step while the one before it runs; None is 1 on a CPU and
        2 elsewhere. Tokens are the same.
      decode_steps: decode steps that one program runs while nobody waits for a row; None is 4 where the host could not
        keep up otherwise (less than 3 GiB of weights a device, or 9 on several GPUs), else 1. Tokens are the same.
      warmup: "full" compiles every bucket at start, "lazy" at first use; "auto" is lazy on CPU only.
      compile_cache: folder of the persistent compilation cache; "auto" is one below the user's cache folder,
        None is off.
      hf_overrides: keys of the model's config.json to replace; None as a value removes the key.
      mesh: devices to run on: sizes of named axes, as in "tensor=2", or a `jax.sharding.Mesh` with such axes; None is
        the default device. Weights, KV cache and vocabulary are divided along the axis "tensor", layers along "pipe".
      pipe_layers: layers of each stage of the axis "pipe"; None divides them evenly.
    """

    model: str = "smollm2"
    tokenizer: str | None = None
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    load_format: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int | None = None
    block_size: int | None = None
    num_blocks: int | None = None
    memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    kernels: str = "auto"
    policy: str = "fcfs"
    depth: int | None = None
    decode_steps: int | None = None
    warmup: str = "auto"
    compile_cache: str | None = "auto"
    hf_overrides: dict[str, Any] | None = None
    mesh: Any = None
    pipe_layers: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        choices = {"dtype": ("auto", *DTYPES), "kv_cache_dtype": KV_CACHE_DTYPES, "load_format": LOAD_FORMATS,
                   "kernels": KERNELS, "policy": ("fcfs", "priority"), "warmup": WARMUPS}  # fmt: skip
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        least = {"max_model_len": 2, "max_num_seqs": 1, "max_num_batched_tokens": 1, "block_size": 1,
                 "num_blocks": 2, "long_prefill_token_threshold": 1, "depth": 1, "decode_steps": 1}  # fmt: skip
        for name, low in least.items():
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < low):
                raise ValueError(f"{name} must be an integer of at least {low}, got {value!r}")
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model must be a path or a name, got {self.model!r}")
        if not 0.0 < self.memory_utilization <= 1.0:
            raise ValueError(f"memory_utilization must be in (0, 1], got {self.memory_utilization}")
        if self.mesh is not None and not isinstance(self.mesh, str) and not hasattr(self.mesh, "axis_names"):
            raise ValueError(f"mesh must be text such as 'tensor=2' or a jax.sharding.Mesh, got {self.mesh!r}")
        layers = self.pipe_layers
        if layers is not None and not (
            isinstance(layers, tuple | list) and layers and all(type(number) is int and number > 0 for number in layers)
        ):
            raise ValueError(f"pipe_layers must be positive integers, one a stage, got {layers!r}")
        if not isinstance(self.seed, int) or not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed must be an integer of at most 64 bits, got {self.seed!r}")

    @classmethod
    def from_kwargs(cls, **kwargs: Any) -> Self:
        """An `EngineConfig` from its own field names or vLLM's.

        Raises:
          ValueError: an unknown name (with the nearest known one), or a vLLM argument set to what is not
            supported.
        """
        names = {item.name for item in dataclasses.fields(cls)}
        known: dict[str, Any] = {}
        sizes = {VLLM_MESH_AXES[name]: value for name, value in kwargs.items() if name in VLLM_MESH_AXES}
        kwargs = {name: value for name, value in kwargs.items() if name not in VLLM_MESH_AXES}
        if sizes and any(value not in (None, 1) for value in sizes.values()):
            if kwargs.get("mesh") is not None:
                raise ValueError(f"mesh={kwargs['mesh']!r} and vLLM's parallel sizes are the same setting")
            kwargs["mesh"] = ",".join(f"{axis}={value}" for axis, value in sizes.items() if value is not None)
        for name, value in kwargs.items():
            if name in VLLM_FIXED:
                if value not in (None, VLLM_FIXED[name]):
                    raise ValueError(f"{name}={value!r} is not supported (only {VLLM_FIXED[name]!r})")
                continue
            field_name = VLLM_ALIASES.get(name, name)
            if field_name not in names:
                near = difflib.get_close_matches(name, [*names, *VLLM_ALIASES], n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ValueError(f"unknown argument {name}{hint}")
            if field_name in known:
                raise ValueError(f"{name} and {field_name} are the same setting")
            known[field_name] = value
        return cls(**known)

    @property
    def cache_dtype(self) -> str:
        """JAX's name of the KV cache's dtype."""
        chosen = self.dtype if self.kv_cache_dtype == "auto" else self.kv_cache_dtype
        return "float8_e4m3fn" if chosen.startswith("fp8") else chosen

    def resolve(self, platform: str, max_position_embeddings: int) -> Self:
        """Fills every automatic value that depends on the platform ("cpu", "gpu" or "tpu").

        `max_model_len` and `num_blocks` stay None where memory decides them later. On a CPU the defaults are a
        person's: float32, small blocks, a small budget, programs compiled when they are first needed.
        """
        is_cpu = platform == "cpu"
        longest = self.max_model_len or max_position_embeddings
        budget = self.max_num_batched_tokens or (512 if is_cpu else min(8192, max(2048, longest)))
        max_num_seqs = self.max_num_seqs or min(budget, 32 if is_cpu else 256)
        return dataclasses.replace(
            self,
            dtype=("float32" if is_cpu else "bfloat16") if self.dtype == "auto" else self.dtype,
            block_size=self.block_size or {"cpu": 16, "tpu": 128}.get(platform, 64),
            max_num_batched_tokens=max(budget, max_num_seqs) if self.max_num_batched_tokens is None else budget,
            max_num_seqs=max_num_seqs,
            depth=self.depth or (1 if is_cpu else 2),
            warmup=("lazy" if is_cpu else "full") if self.warmup == "auto" else self.warmup,
        )
