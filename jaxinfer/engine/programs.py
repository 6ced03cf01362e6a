"""The engine's programs: its pure functions (`functions`) in their compiled forms.

      step     (constants, caches, tables, buffers, carry, staged, packed)
                   -> (caches, tables, buffers, carry, staged, tokens)                        keyed by shape
      steps    (constants, caches, tables, carry, packed) -> (caches, tables, carry, tokens)    keyed by k, decode shape
      cut      (carry, logits, rows)                    -> (carry, out)                       keyed by S
      full     (carry, features, logits, rows)          -> (carry, features, out)             keyed by S
      admit    (carry, tables, packed)                  -> (carry, tables)       slots that get a new owner
      features (features, packed)                       -> features              the same, for the full sampler
      copy     (caches, sources, targets)               -> caches                copy-on-write of blocks
      prompt   (constants, hidden, indices, targets)      -> log-probabilities of given tokens

Where the model is a stage of a pipeline, those before the last have `relay` in place of `step`, the first of them takes
the last one's tokens, and only the last samples. `step` and `relay` of all but the first also read the residual.

      relay    (constants, caches, tables, carry, staged, packed) -> (caches, tables, carry, staged, residual)   (T, S)
      receive  (carry, tokens, slots)                   -> carry                                        keyed by S

Donated state comes back first. Nothing else is compiled while serving.

`steps` is several decode steps in a loop on the device, for few rows: their plans and tokens have a leading axis. It
leaves nothing behind for other programs. One call serves them all.

A step samples its rows itself, unless its plan says that another program does: `cut` has min-p, top-k and top-p (as has
`steps`), `full` has every feature. One program a step: each call costs the
host some 0.2 ms. What a step leaves is written into the buffers of the step before (donated, one a size), and its plan
is first copied to a fixed place: XLA replays a step's command buffer as it is where no address has changed, and updates
the other nodes, which for all of them takes the host as long as a small step takes the device.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxinfer.batch import (
    BatchLayout,
    BatchShape,
    Constants,
    DeviceShapes,
    LogprobOutput,
    Rows,
    StepBuffers,
    StepOutput,
)
from jaxinfer.config import ModelConfig
from jaxinfer.engine import functions
from jaxinfer.engine.executables import ExecutableCache
from jaxinfer.engine.functions import Functions
from jaxinfer.kernels.all_reduce.channel import abstract
from jaxinfer.models import DenseModel
from jaxinfer.sampling import sample_cut, sample_full
from jaxinfer.sharding.parameters import abstract_parameters
from jaxinfer.sharding.placement import device_bytes, on_mesh
from jaxinfer.sharding.rules import sharding_of

ADMIT_ROWS = 8
"""Slots that one upload refills."""
FEATURE_ROWS = 2
PROMPT_ROWS = 64
"""Prompt positions whose logits are made at once: never [T, V]."""
COPY_SIZES = (8,)
"""Blocks that one copy program moves; the largest is max_num_seqs, since a plan copies at most one block a row."""
BURST_ROWS = 64
"""Decode steps of more rows take the device longer than the host: no program runs several of them."""
COMPILE_STACK_BYTES = 64 << 20
"""XLA's passes recurse deeply; the default stack of a thread overflows on large programs."""

MOST_THREADS = max(8, min(16, os.cpu_count() or 8))

type Key = tuple[Any, ...]


@dataclass
class CompileStats:
    """What compilation cost: before serving (warm-up) and, a defect on accelerators, during it."""

    num_programs: int = 0
    seconds: float = 0.0
    num_lazy: int = 0
    names: list[str] = field(default_factory=list)


class Programs:
    """All programs of an engine, compiled ahead or at first use.

    Args:
      model: the abstract model.
      config: its dimensions, on a mesh as the mesh has them.
      shapes: sizes shared by all programs.
      num_blocks: blocks of the pool.
      block_size: tokens a block.
      dtype: of activations.
      cache_dtype: of the cache; None is `dtype`.
      decode_steps: of `steps` programs; with 1 there are none.
      mesh: where to run: each program is then one `shard_map`, and what is here is on one device's parts. None is the
        default device.
      message_rows: tokens of a step up to which the all-reduce kernel sums, where the model asks for that.
      is_first: the model begins with the embedding.
      is_last: the model ends with the head.
    """

    def __init__(
        self,
        model: DenseModel,
        config: ModelConfig,
        shapes: DeviceShapes,
        *,
        num_blocks: int,
        block_size: int,
        dtype: str,
        cache_dtype: str | None = None,
        decode_steps: int = 1,
        mesh: Mesh | None = None,
        message_rows: int = 0,
        is_first: bool = True,
        is_last: bool = True,
    ) -> None:
        self.decode_steps = decode_steps
        self.mesh = mesh
        self.is_first, self.is_last = is_first, is_last
        graph, state = nnx.split(model)
        leaves, tree = jax.tree.flatten(state)
        leaves = leaves if mesh is None else abstract_parameters(model, mesh)
        self.channel = None
        if mesh is not None and model.kernels.all_reduce == "mosaic_gpu":
            sizes = {"rows": message_rows, "hidden": config.hidden_size, "dtype": jnp.dtype(dtype)}
            self.channel = abstract(mesh, "tensor", **sizes)
        self.constants = Constants(leaves, self.channel)  # pyright: ignore[reportArgumentType]
        self.functions = Functions(
            lambda constants: nnx.merge(graph, jax.tree.unflatten(tree, constants.weights)),
            shapes,
            sampling=model.kernels.sampling,
            axis_name=model.axis_name,
        )
        self.shapes = shapes
        self.hidden_size, self.dtype = config.hidden_size, jnp.dtype(dtype)
        self.num_logits = config.vocab_size  # of a row; V, or a little more on a mesh
        self.stats = CompileStats()
        cache = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        page = self._sharded("KV cache", cache, jnp.dtype(cache_dtype or dtype), (None, "kv_heads", None, None))
        self.caches: list[Any] = [(page, page) for _ in range(config.num_layers)]
        self.tables = jax.ShapeDtypeStruct((shapes.num_slots, shapes.max_blocks), jnp.int32)
        self.carry = jax.eval_shape(shapes.zero_carry)
        self.features = jax.eval_shape(shapes.zero_features) if is_last else None
        self._compiled: dict[Key, Callable[..., Any]] = {}
        self._lock, self._lowering = threading.Lock(), threading.Lock()
        self.saved: ExecutableCache | None = None  # where compiled programs are found and kept

    # -- access -----------------------------------------------------------------------------------

    def get(self, key: Key) -> Callable[..., Any]:
        """A compiled program; compiled now if it was not yet."""
        if key not in self._compiled:
            self.stats.num_lazy += 1
            self._compile(key)
        return self._compiled[key]

    def missing(self, keys: Iterable[Key]) -> list[Key]:
        """Those of the keys that are not compiled yet."""
        return [key for key in dict.fromkeys(keys) if key not in self._compiled]

    def compile(self, keys: Iterable[Key], on_done: Callable[[Key], None] = lambda key: None) -> None:
        """Compiles programs on threads. Lowering is Python, so one program at a time: the first are compiled while the
        next are lowered. Together they would take as long, and all be ready for XLA at the end.
        """
        missing = self.missing(keys)

        def work(key: Key) -> None:
            self._compile(key)
            on_done(key)

        old = threading.stack_size(COMPILE_STACK_BYTES)
        try:
            with ThreadPoolExecutor(max_workers=max(1, min(MOST_THREADS, len(missing)))) as pool:
                list(pool.map(work, missing))
        finally:
            threading.stack_size(old)

    def _compile(self, key: Key) -> None:
        start = time.perf_counter()
        function, donated, arguments = self._describe(key)
        name, results = "-".join(map(str, key)), self._results(key, arguments)
        compiled = None if self.saved is None else self.saved.load(name, arguments, results)
        if compiled is None:
            if self.mesh is not None:
                function, arguments = on_mesh(function, arguments, results, self.mesh)
            jitted = jax.jit(function, donate_argnums=donated, keep_unused=True)
            with self._lowering:
                lowered = jitted.lower(*arguments)
            compiled = lowered.compile()
            if self.saved is not None:
                self.saved.store(name, compiled, results)
        with self._lock:
            self._compiled[key] = compiled
            self.stats.num_programs += 1
            self.stats.seconds += time.perf_counter() - start
            self.stats.names.append(name)

    def temporary_bytes(self, key: Key) -> int:
        """Device memory that a program needs beside its arguments and aliased results."""
        analysis = self.get(key).memory_analysis()  # pyright: ignore[reportFunctionMemberAccess]
        return analysis.temp_size_in_bytes + analysis.output_size_in_bytes - analysis.alias_size_in_bytes

    def largest_temporaries(self, shapes: Iterable[BatchShape]) -> int:
        """Bytes that programs need beside weights, pool and tables: the temporaries of the largest one compiled, and
        the buffers that steps of these shapes leave for the sampler."""
        logits = {shape.num_rows: self._logits(shape.num_rows) for shape in shapes} if self.is_last else {}
        hidden = self.hidden()  # of stages before the last it is what they send
        return device_bytes((logits, hidden)) + max(map(self.temporary_bytes, self._compiled), default=0)

    # -- what each program is ---------------------------------------------------------------------

    def step_key(self, shape: BatchShape) -> Key:
        return ("step" if self.is_last else "relay", *shape)

    def keys(self, shapes: Iterable[BatchShape]) -> list[Key]:
        """Every program that steps of these shapes need."""
        shapes = list(shapes)
        rows = sorted({shape.num_rows for shape in shapes}, reverse=True)
        steps, copies = list(map(self.step_key, shapes)), [("copy", size) for size in self.copy_sizes]
        if not self.is_last:
            receivers = [("receive", size) for size in rows] if self.is_first else []
            return [*steps, *receivers, ("admit",), *copies]
        samplers = [(kind, size) for size in rows for kind in ("full", "cut")]
        bursts = [self.burst_key(shape) for shape in shapes if self.has_burst(shape)]
        return [*steps, *bursts, *samplers, ("admit",), ("features",), *copies, ("prompt",)]

    def burst_key(self, shape: BatchShape) -> Key:
        return ("steps", self.decode_steps, *shape)

    def has_burst(self, shape: BatchShape) -> bool:
        """Whether there is a program for several steps of this shape."""
        return self.decode_steps > 1 and shape.is_decode and shape.num_rows <= BURST_ROWS

    @property
    def copy_sizes(self) -> tuple[int, ...]:
        return tuple(sorted({*(size for size in COPY_SIZES if size < self.shapes.num_slots), self.shapes.num_slots}))

    def _describe(self, key: Key) -> tuple[Callable[..., Any], tuple[int, ...], tuple[Any, ...]]:
        """(function, donated arguments, abstract arguments) of a key."""
        match key:
            case ("step", *shape):
                layout = BatchLayout(BatchShape(*shape))
                state = (self.caches, self.tables, self.buffers(layout.shape), self.carry, self.staged(layout.size))
                given = (self.constants, *state, self.packed(layout.size), *self._arriving(layout.shape))
                return self.functions.step(layout), (1, 2, 3, 4, 5), given
            case ("relay", *shape):
                layout = BatchLayout(BatchShape(*shape))
                state = (self.caches, self.tables, self.carry, self.staged(layout.size))
                given = (self.constants, *state, self.packed(layout.size), *self._arriving(layout.shape))
                return self.functions.relay(layout), (1, 2, 3, 4), given
            case ("receive", num_rows):
                ints = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
                return functions.receive, (0,), (self.carry, ints, ints)
            case ("steps", num_steps, *shape):
                layout = BatchLayout(BatchShape(*shape))
                packed = jax.ShapeDtypeStruct((num_steps, layout.size), jnp.int32)
                state = (self.caches, self.tables, self.carry)
                return self.functions.steps(layout, num_steps), (1, 2, 3), (self.constants, *state, packed)
            case ("cut", num_rows):
                arguments = (self.carry, self._logits(num_rows), _abstract_rows(num_rows))
                return partial(sample_cut, **self.functions.sampler_options), (0,), arguments
            case ("full", num_rows):
                arguments = (self.carry, self.features, self._logits(num_rows), _abstract_rows(num_rows))
                return partial(sample_full, **self.functions.sampler_options), (0, 1), arguments
            case ("admit",):
                packed = jax.ShapeDtypeStruct((ADMIT_ROWS, self.shapes.slot_layout.width), jnp.int32)
                return self.functions.admit, (0, 1), (self.carry, self.tables, packed)
            case ("features",):
                packed = jax.ShapeDtypeStruct((FEATURE_ROWS, self.shapes.feature_layout.width), jnp.int32)
                return self.functions.upload_features, (0,), (self.features, packed)
            case ("copy", size):
                blocks = jax.ShapeDtypeStruct((size,), jnp.int32)
                return functions.copy_blocks, (0,), (self.caches, blocks, blocks)
            case ("prompt",):
                ints = jax.ShapeDtypeStruct((PROMPT_ROWS,), jnp.int32)
                return self.functions.prompt_logprobs, (), (self.constants, self.hidden(), ints, ints)
        raise KeyError(key)

    @staticmethod
    def _results(key: Key, arguments: tuple[Any, ...]) -> Any:
        """A pytree of the structure of a program's results."""
        logprobs = LogprobOutput(*[0] * 4)  # pyright: ignore[reportArgumentType]
        match key[0]:
            case "step":
                return *arguments[1:6], 0
            case "relay":
                return *arguments[1:5], 0
            case "steps":
                return *arguments[1:4], 0
            case "cut":
                return arguments[0], StepOutput(0, None)  # pyright: ignore[reportArgumentType]
            case "full":
                return *arguments[:2], StepOutput(0, logprobs)  # pyright: ignore[reportArgumentType]
            case "admit":
                return arguments[:2]
            case "prompt":
                return logprobs
        return arguments[0]  # features, copy, receive

    def packed(self, least: int = 0) -> jax.ShapeDtypeStruct:
        """A plan, as the host hands it over: of one size for all buckets."""
        return jax.ShapeDtypeStruct((max(self.shapes.buffer_size, least),), jnp.int32)

    def staged(self, least: int = 0) -> jax.ShapeDtypeStruct:
        """Where a step finds its plan: one place for all buckets. It is longer than the plan, since XLA takes an update
        of a whole array for the update itself, which lies elsewhere each time."""
        return jax.ShapeDtypeStruct((self.packed(least).size + 1,), jnp.int32)

    def buffers(self, shape: BatchShape) -> StepBuffers:
        """Shapes of what a step leaves for the sampler."""
        hidden = self.hidden(shape.num_tokens)
        return StepBuffers(self._logits(shape.num_rows), _abstract_rows(shape.num_rows), hidden)  # pyright: ignore[reportArgumentType]

    def hidden(self, least: int = 0) -> jax.ShapeDtypeStruct:
        """Where a step leaves its hidden states: one place for all buckets."""
        return jax.ShapeDtypeStruct((max(self.shapes.max_tokens, least), self.hidden_size), self.dtype)

    def _arriving(self, shape: BatchShape) -> tuple[jax.ShapeDtypeStruct, ...]:
        """What a step reads of the stage before, if there is one."""
        return () if self.is_first else (self.residual(shape),)

    def residual(self, shape: BatchShape) -> jax.ShapeDtypeStruct:
        """What stages pass on."""
        return jax.ShapeDtypeStruct((shape.num_tokens, self.hidden_size), self.dtype)

    def _logits(self, num_rows: int) -> jax.ShapeDtypeStruct:
        return self._sharded("logits", (num_rows, self.num_logits), jnp.dtype(jnp.float32), (None, "vocab"))

    def _sharded(
        self, name: str, shape: tuple[int, ...], dtype: jnp.dtype, axes: tuple[str | None, ...]
    ) -> jax.ShapeDtypeStruct:
        """An abstract array that the mesh divides, if there is one."""
        sharding = None if self.mesh is None else sharding_of(name, shape, axes, self.mesh)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _abstract_rows(num_rows: int) -> Rows:
    ints = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    return Rows(ints, jax.ShapeDtypeStruct((num_rows,), jnp.bool_), ints)  # pyright: ignore[reportArgumentType]
