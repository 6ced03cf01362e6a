"""From a configuration to everything an engine runs on: checkpoint, model, memory, programs."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding, SingleDeviceSharding

from jaxinfer.batch import BatchLayout, DeviceShapes
from jaxinfer.config import EngineConfig, Kernels, ModelConfig
from jaxinfer.engine.buckets import BucketLadder
from jaxinfer.engine.executables import ExecutableCache
from jaxinfer.engine.memory import Device, MemoryAccount, estimate_temporaries, fullest, size_pool
from jaxinfer.engine.pipeline import Pipeline
from jaxinfer.engine.programs import Key, Programs
from jaxinfer.engine.runner import Runner
from jaxinfer.kernels import all_reduce, kv_update, linear, paged_attention, sampling
from jaxinfer.loaders import Checkpoint, Dummy, OrbaxFolder, dummy_weights, fill_weights, open_checkpoint
from jaxinfer.models import DenseModel, Partition, build_model, cut_stages, divide, find_family, parse_config
from jaxinfer.models.partition import own_place, own_shape, widen
from jaxinfer.scheduler import resolve_max_model_len
from jaxinfer.sharding.mesh import own_devices, resolve_mesh
from jaxinfer.sharding.parameters import abstract_parameters
from jaxinfer.sharding.placement import device_bytes
from jaxinfer.sharding.processes import maximum, minimum
from jaxinfer.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf

LOGGER = logging.getLogger("jaxinfer")

SMALL_MODEL_BYTES = 3 << 30
"""An H200 reads such weights in less time than its host takes to start a step (about 1 ms)."""
SMALL_PART_BYTES = 9 << 30
"""The same of a device's part where GPUs share a step: starting one on two devices takes the host 2 to 4 ms."""

type OnCompile = Callable[[int, bool], None]
"""Called with (number of programs, False) before they are compiled, and with (0, True) for each that is done."""


@dataclass(frozen=True)
class Parts:
    """What `build` makes."""

    config: EngineConfig  # resolved; max_model_len and num_blocks are numbers
    model: ModelConfig
    tokenizer: Tokenizer | None
    runner: Runner | Pipeline
    account: MemoryAccount  # of the devices that hold fewest blocks
    attention: str  # implementations


def build(config: EngineConfig, on_compile: OnCompile = lambda count, is_done: None) -> Parts:
    """Loads a model and makes the engine's device side. Programs are compiled on threads while weights load.

    Args:
      config: what to run and how.
      on_compile: see `Engine`.

    Raises:
      ValueError: what the user asked for cannot be had; one sentence with the values.
    """
    checkpoint = open_checkpoint(config.model, config.load_format)
    with _blaming(checkpoint.path):
        model_config = parse_config(checkpoint.config, checkpoint.generation_config, config.hf_overrides)
        tokenizer = open_tokenizer(config, checkpoint)
    folder = _enable_compile_cache(config.compile_cache)
    mesh = resolve_mesh(config.mesh)
    if mesh is not None and mesh.shape["data"] > 1:
        raise ValueError(f"an Engine is one replica of data={mesh.shape['data']}: use LLM, or open_engine")
    cuts = cut_stages(model_config, mesh, config.pipe_layers)
    config = _resolve(config, model_config, len(cuts))
    stages = {number: _stage(cut, config) for number, cut in enumerate(cuts) if own_devices(cut.mesh)}
    if config.decode_steps is None:
        config = dataclasses.replace(config, decode_steps=_decode_steps(next(iter(stages.values()))))
    ladder = _ladder(config, len(cuts))
    asked, is_loaded = config, False
    while True:
        account = _size(asked, [*stages.values()], ladder)
        num_tokens = (account.num_blocks - 1) * (config.block_size or 0)
        longest = resolve_max_model_len(asked.max_model_len, model_config.max_position_embeddings, num_tokens)
        config = dataclasses.replace(asked, max_model_len=longest, num_blocks=account.num_blocks)
        keys = []
        for stage in stages.values():
            stage.programs = _programs(config, stage, ladder, account.num_blocks, longest)
            stage.programs.saved = _saved(folder, config, stage)
            keys.append(stage.programs.keys(ladder.shapes) if config.warmup == "full" else [])
        if any(keys):
            on_compile(sum(map(len, keys)), False)
        with ThreadPoolExecutor(max_workers=1) as background:
            compiling = background.submit(_compile, [*stages.values()], keys, lambda key: on_compile(0, True))
            for stage in [] if is_loaded else stages.values():
                stage.weights = load_weights(config, checkpoint, stage.cut, stage.model, stage.devices[0])
            is_loaded = True
            compiling.result()
        if not any(keys) or jax.default_backend() == "cpu":
            break
        needed = maximum(max(stage.programs.largest_temporaries(ladder.shapes) for stage in stages.values()))
        if needed <= account.temporaries or asked.num_blocks is not None:
            account = dataclasses.replace(account, temporaries=needed)
            break
        LOGGER.info("programs need %d bytes beside the KV cache, not %d: sizing again", needed, account.temporaries)
        for stage in stages.values():
            stage.temporaries = needed
    _tell_lowered(asked, config, model_config)
    LOGGER.info("device memory:\n%s", account.describe())
    runners = {number: Runner(stage.weights, stage.programs, ladder) for number, stage in stages.items()}
    meshes = [cut.mesh for cut in cuts if cut.mesh is not None]
    runner = Pipeline(runners, meshes) if len(cuts) > 1 else runners[0]
    kernels = next(reversed(stages.values())).model.kernels
    return Parts(config, model_config, tokenizer, runner, account, str(kernels))


@dataclass
class Stage:
    """A model, or one of its stages, while it is built."""

    cut: Partition
    model: DenseModel
    devices: list[Device]  # of this process
    temporaries: int | None = None  # known when programs are compiled
    account: MemoryAccount = field(init=False)
    programs: Programs = field(init=False)
    weights: list[jax.Array] = field(init=False)


def _stage(cut: Partition, config: EngineConfig) -> Stage:
    devices = own_devices(cut.mesh)
    kernels = choose_kernels(config, cut.local, devices[0])
    if config.kernels != "reference" and message_rows(config, cut, devices[0]):
        kernels = dataclasses.replace(kernels, all_reduce="mosaic_gpu")
    return Stage(cut, build_model(cut, config.dtype, kernels), devices)


def _resolve(config: EngineConfig, model: ModelConfig, num_stages: int) -> EngineConfig:
    """Fills automatic values that depend on platform and stages; of a single stage all but `decode_steps`.

    Raises:
      ValueError: what a pipeline cannot do.
    """
    platform = jax.default_backend()
    if num_stages > 1:
        if (config.decode_steps or 1) > 1:
            raise ValueError(f"decode_steps={config.decode_steps} is not possible with pipe={num_stages}: only 1 is")
        # over several processes, two steps of a group are never in flight together
        has_one_ahead = platform != "cpu" and jax.process_count() == 1
        config = dataclasses.replace(config, decode_steps=1, depth=config.depth or num_stages + has_one_ahead)
    return config.resolve(platform, model.max_position_embeddings)


def _decode_steps(stage: Stage) -> int:
    """Several where the host could not keep up with single steps."""
    num_devices = 1 if stage.cut.mesh is None else stage.cut.mesh.size
    return default_decode_steps(jax.default_backend(), device_bytes(nnx.state(stage.model)), num_devices)


def default_decode_steps(platform: str, num_bytes: int, num_devices: int) -> int:
    """Decode steps that one program runs, for a model of so many bytes on a mesh of so many devices."""
    if platform == "cpu":
        return 1
    is_shared = num_devices > 1 and platform == "gpu"  # what a TPU's host takes has not been measured
    return 4 if num_bytes // num_devices < (SMALL_PART_BYTES if is_shared else SMALL_MODEL_BYTES) else 1


def _size(config: EngineConfig, stages: list[Stage], ladder: BucketLadder) -> MemoryAccount:
    """Accounts of this process's stages; that of the one with room for the fewest blocks, of those that any process has
    room for.

    An unknown need for temporaries is estimated. All bytes are one device's: every device of a stage holds as much.
    """
    longest = config.max_model_len or stages[0].cut.model.max_position_embeddings
    for stage in stages:
        cut, draft = stage.cut, _programs(config, stage, ladder, 2, longest)
        if stage.temporaries is None:
            estimate = estimate_temporaries(cut.local, ladder.shapes[0], config)
            stage.temporaries = draft.largest_temporaries(ladder.shapes) + estimate
            others = None
        else:
            others = stage.account.others
        stage.account = size_pool(
            config,
            cut.local,
            weights=device_bytes(draft.constants),
            temporaries=stage.temporaries,
            tables=device_bytes((draft.tables, draft.carry, draft.features)),
            device=fullest(stage.devices),
            others=others,
        )
    tightest = min((stage.account for stage in stages), key=lambda account: account.num_blocks)
    return dataclasses.replace(tightest, num_blocks=minimum(tightest.num_blocks))


def _saved(folder: Path | None, config: EngineConfig, stage: Stage) -> ExecutableCache | None:
    """Where the stage's compiled programs are kept."""
    if folder is None or stage.devices[0].platform == "cpu" or jax.process_count() > 1:
        return None
    cut, programs = stage.cut, stage.programs
    flags = os.environ.get("XLA_FLAGS"), os.environ.get("LIBTPU_INIT_ARGS")
    sizes = programs.shapes, programs.caches[0], programs.channel, config.dtype, config.block_size
    ingredients = (flags, cut.model, cut.first_layer, cut.whole.num_layers, stage.model.kernels, sizes)
    return ExecutableCache(folder / "programs", ingredients, *stage.devices)


def _compile(stages: list[Stage], keys: list[list[Key]], on_done: Callable[[Key], None]) -> None:
    for stage, wanted in zip(stages, keys, strict=True):
        stage.programs.compile(wanted, on_done)


def _tell_lowered(asked: EngineConfig, config: EngineConfig, model_config: ModelConfig) -> None:
    longest = config.max_model_len or 0
    if asked.max_model_len is None and longest < model_config.max_position_embeddings:
        LOGGER.warning(
            "max_model_len is lowered from the model's %d to %d tokens, what the KV cache holds",
            model_config.max_position_embeddings,
            longest,
        )


@contextmanager
def _blaming(path: str) -> Iterator[None]:
    """Turns what a malformed file makes Python raise into an error that names the file."""
    try:
        yield
    except (TypeError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
        raise ValueError(f"{path}: a setting is malformed: {type(error).__name__}: {error}") from None


def open_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer that was named, or the model's; None where a folder has none."""
    if config.tokenizer is not None:
        path = Path(config.tokenizer).expanduser()
        if not path.exists():
            raise ValueError(f"tokenizer {config.tokenizer!r}: no such file or folder")
        return load_tokenizer(path)
    if checkpoint.tokenizer_data is not None:
        return tokenizer_from_gguf(checkpoint.tokenizer_data)
    folder = Path(checkpoint.path)
    return load_tokenizer(folder) if (folder / "tokenizer.json").is_file() else None


def choose_kernels(config: EngineConfig, model_config: ModelConfig, device: Device) -> Kernels:
    """The implementation of each kernel: what the device can run, or the reference if that was asked for."""
    assert config.block_size is not None
    assert config.max_num_seqs is not None
    assert config.max_num_batched_tokens is not None
    if config.kernels == "reference":
        return Kernels()
    longest = config.max_model_len or model_config.max_position_embeddings
    layer: dict[str, Any] = {
        "compute_capability": str(getattr(device, "compute_capability", "")),
        "dtype": jnp.dtype(config.dtype),
        "cache_dtype": jnp.dtype(config.cache_dtype),
        "num_heads": model_config.num_heads,
        "num_kv_heads": model_config.num_kv_heads,
        "head_dim": model_config.head_dim,
        "block_size": config.block_size,
    }
    tables = (config.max_num_seqs, -(-longest // config.block_size))
    platform = jax.default_backend()
    return Kernels(
        paged_attention.choose(platform, **layer, table_shape=tables),
        kv_update.choose(platform, **layer, num_tokens=config.max_num_batched_tokens),
        linear=linear.choose(platform, compute_capability=layer["compute_capability"]),
        sampling=sampling.choose(platform, compute_capability=layer["compute_capability"]),
    )


def message_rows(config: EngineConfig, cut: Partition, device: Device) -> int:
    """Tokens of a step up to which the all-reduce kernel is faster than XLA's; 0 where there is none."""
    assert config.max_num_seqs is not None
    if cut.mesh is None or cut.axis_name is None or not all_reduce.is_reachable(cut.mesh):
        return 0
    facts = {"compute_capability": str(getattr(device, "compute_capability", "")), "dtype": jnp.dtype(config.dtype)}
    sizes = {"hidden": cut.model.hidden_size, "ranks": cut.mesh.shape[cut.axis_name]}
    rows = 1 << (config.max_num_seqs - 1).bit_length()
    while rows and all_reduce.choose(device.platform, **facts, rows=rows, **sizes) != "mosaic_gpu":
        rows //= 2
    return rows


def load_weights(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model_config: ModelConfig | Partition,
    model: DenseModel,
    device: Device,
) -> list[jax.Array]:
    """The flat list of parameters, in the model's leaf order: on the device, or where the mesh has them.

    Each device gets its own part and nothing else; files are read by the part where their format allows it.
    """
    cut = divide(model_config, None) if isinstance(model_config, ModelConfig) else model_config
    leaves: list[tuple[Any, Any]] = [
        (cut.path_in_model(path), leaf.get_value())  # pyright: ignore[reportArgumentType]
        for path, leaf in nnx.to_flat_state(nnx.state(model))
    ]
    sources = find_family([cut.model.architecture]).sources(cut)
    others = set(sources) - {path for path, _ in leaves}
    assert not (others and cut.is_first and cut.is_last), f"the model has no {others}"
    shardings: list[Sharding] = [SingleDeviceSharding(device)] * len(leaves)
    if cut.mesh is not None:
        shardings = [leaf.sharding for leaf in abstract_parameters(model, cut.mesh)]
    if config.load_format == "dummy":
        numbers = {path: number for number, path in enumerate(sorted(sources))}
        parameters = [
            Dummy(
                leaf,
                own_shape(path, leaf.shape, cut),
                partial(own_place, path, partition=cut),
                path[-2:],
                numbers[path],
            )
            for path, leaf in leaves
        ]
        return dummy_weights(parameters, shardings, config.seed)
    if isinstance(checkpoint, OrbaxFolder):
        own = [(path, jax.ShapeDtypeStruct(own_shape(path, leaf.shape, cut), leaf.dtype)) for path, leaf in leaves]
        pairs = zip(own, leaves, strict=True)
        wide = {
            path: partial(widen, path, partition=cut) for (path, one), (_, leaf) in pairs if one.shape != leaf.shape
        }
        return checkpoint.restore(own, shardings, wide, others)
    where = dict(zip([path for path, _ in leaves], shardings, strict=True))
    rest = [sources.pop(path) for path in others]
    is_tied = cut.model.tie_word_embeddings
    return fill_weights(checkpoint, leaves, sources, where.__getitem__, others=rest, is_tied=is_tied)


def _ladder(config: EngineConfig, num_groups: int) -> BucketLadder:
    """The buckets of a step: of one of the groups that take turns."""
    assert config.max_num_seqs is not None
    assert config.max_num_batched_tokens is not None
    assert config.block_size is not None
    platform = jax.default_backend()
    num_rows = -(-config.max_num_seqs // num_groups)
    return BucketLadder.make(platform, num_rows, config.max_num_batched_tokens, config.block_size)


def _programs(
    config: EngineConfig, stage: Stage, ladder: BucketLadder, num_blocks: int, max_model_len: int
) -> Programs:
    cut = stage.cut
    assert config.max_num_seqs is not None
    assert config.block_size is not None
    shapes = DeviceShapes(
        num_slots=config.max_num_seqs,
        max_blocks=-(-max_model_len // config.block_size),
        max_len=max_model_len,
        vocab_size=cut.model.vocab_size,
        buffer_size=max(BatchLayout(shape).size for shape in ladder.shapes),
        max_tokens=max(shape.num_tokens for shape in ladder.shapes),
    )
    return Programs(
        stage.model,
        cut.whole,
        shapes,
        num_blocks=num_blocks,
        block_size=config.block_size,
        dtype=config.dtype,
        cache_dtype=config.cache_dtype,
        decode_steps=config.decode_steps or 1,
        mesh=cut.mesh,
        message_rows=message_rows(config, cut, stage.devices[0]),
        is_first=cut.is_first,
        is_last=cut.is_last,
    )


def _enable_compile_cache(setting: str | None) -> Path | None:
    """Turns on jax's persistent compilation cache, unless the user has set one up or does not want it; its folder."""
    if setting is None:
        return None
    if jax.config.jax_compilation_cache_dir is not None:
        return Path(jax.config.jax_compilation_cache_dir)
    if setting == "auto":
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        setting = str(root / "jaxinfer" / f"jax-{jax.__version__}")
    jax.config.update("jax_compilation_cache_dir", setting)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return Path(setting)
