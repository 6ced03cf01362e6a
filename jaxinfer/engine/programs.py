"""The engine's pure functions, and their compiled forms.

      step     (constants, caches, tables, buffers, carry, staged, packed)
                   -> (caches, tables, buffers, carry, staged, tokens)                        keyed by shape
      steps    (constants, caches, tables, carry, packed) -> (caches, tables, carry, tokens)    keyed by k, decode shape
      full     (carry, features, logits, rows)          -> (carry, features, out)             keyed by S
      admit    (carry, tables, packed)                  -> (carry, tables)       slots that get a new owner
      features (features, packed)                       -> features              the same, for the full sampler
      copy     (caches, sources, targets)               -> caches                copy-on-write of blocks
      prompt   (constants, hidden, indices, targets)      -> log-probabilities of given tokens

Donated state comes back first. Nothing else is compiled while serving.

`steps` is several decode steps in a loop on the device, for few rows: their plans and tokens have a leading axis. It
leaves nothing behind for other programs. One call serves them all.

A step samples its rows itself, unless its plan says that the full sampler does. One program a step: each call costs the
host some 0.2 ms. What a step leaves is written into the buffers of the step before (donated, one a size), and its plan
is first copied to a fixed place: XLA replays a step's command buffer as it is where no address has changed, and updates
the other nodes, which for all of them takes the host as long as a small step takes the device.
"""

from __future__ import annotations

import dataclasses
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
    Batch,
    BatchLayout,
    BatchShape,
    Carry,
    Constants,
    DeviceShapes,
    Features,
    LogprobOutput,
    Rows,
    StepBuffers,
    StepOutput,
    features_from_columns,
)
from jaxinfer.config import ModelConfig
from jaxinfer.engine.derive import derive_inputs
from jaxinfer.engine.executables import ExecutableCache
from jaxinfer.kernels.all_reduce.channel import abstract
from jaxinfer.layers import KVCache
from jaxinfer.models import DenseModel
from jaxinfer.sampling import raw_logprobs, sample_full, sample_plain
from jaxinfer.sharding.collectives import gather_columns
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
    ) -> None:
        self.decode_steps = decode_steps
        self.mesh, self.axis_name = mesh, model.axis_name
        self.sampling = model.kernels.sampling
        graph, state = nnx.split(model)
        leaves, tree = jax.tree.flatten(state)
        leaves = leaves if mesh is None else abstract_parameters(model, mesh)
        self.channel = None
        if mesh is not None and model.kernels.all_reduce == "mosaic_gpu":
            sizes = {"rows": message_rows, "hidden": config.hidden_size, "dtype": jnp.dtype(dtype)}
            self.channel = abstract(mesh, "tensor", **sizes)
        self.constants = Constants(leaves, self.channel)  # pyright: ignore[reportArgumentType]
        self._rebuild = lambda constants: nnx.merge(graph, jax.tree.unflatten(tree, constants.weights))
        self.shapes = shapes
        self.hidden_size, self.dtype = config.hidden_size, jnp.dtype(dtype)
        self.num_logits = config.vocab_size  # of a row; V, or a little more on a mesh
        self.stats = CompileStats()
        cache = (num_blocks, config.num_kv_heads, block_size, config.head_dim)
        page = self._sharded("KV cache", cache, jnp.dtype(cache_dtype or dtype), (None, "kv_heads", None, None))
        self.caches: list[Any] = [(page, page) for _ in range(config.num_layers)]
        self.tables = jax.ShapeDtypeStruct((shapes.num_slots, shapes.max_blocks), jnp.int32)
        self.carry = jax.eval_shape(shapes.zero_carry)
        self.features = jax.eval_shape(shapes.zero_features)
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
        logits = {shape.num_rows: self._logits(shape.num_rows) for shape in shapes}
        return device_bytes((logits, self.hidden())) + max(map(self.temporary_bytes, self._compiled), default=0)

    # -- what each program is ---------------------------------------------------------------------

    def step_key(self, shape: BatchShape) -> Key:
        return ("step", *shape)

    def keys(self, shapes: Iterable[BatchShape]) -> list[Key]:
        """Every program that steps of these shapes need."""
        shapes = list(shapes)
        rows = sorted({shape.num_rows for shape in shapes}, reverse=True)
        samplers = [("full", size) for size in rows]
        copies = [("copy", size) for size in self.copy_sizes]
        bursts = [self.burst_key(shape) for shape in shapes if self.has_burst(shape)]
        return [*map(self.step_key, shapes), *bursts, *samplers, ("admit",), ("features",), *copies, ("prompt",)]

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
                staged = self.staged(layout.size)
                state = (self.caches, self.tables, self.buffers(layout.shape), self.carry, staged)
                return self._step(layout), (1, 2, 3, 4, 5), (self.constants, *state, staged)
            case ("steps", num_steps, *shape):
                layout = BatchLayout(BatchShape(*shape))
                packed = jax.ShapeDtypeStruct((num_steps, layout.size), jnp.int32)
                state = (self.caches, self.tables, self.carry)
                return self._steps(layout), (1, 2, 3), (self.constants, *state, packed)
            case ("full", num_rows):
                arguments = (self.carry, self.features, self._logits(num_rows), _abstract_rows(num_rows))
                options = {"implementation": self.sampling, "axis_name": self.axis_name}
                return partial(sample_full, vocab_size=self.shapes.vocab_size, **options), (0, 1), arguments
            case ("admit",):
                packed = jax.ShapeDtypeStruct((ADMIT_ROWS, self.shapes.slot_layout.width), jnp.int32)
                return self._admit, (0, 1), (self.carry, self.tables, packed)
            case ("features",):
                packed = jax.ShapeDtypeStruct((FEATURE_ROWS, self.shapes.feature_layout.width), jnp.int32)
                return self._upload_features, (0,), (self.features, packed)
            case ("copy", size):
                blocks = jax.ShapeDtypeStruct((size,), jnp.int32)
                return copy_blocks, (0,), (self.caches, blocks, blocks)
            case ("prompt",):
                ints = jax.ShapeDtypeStruct((PROMPT_ROWS,), jnp.int32)
                return self._prompt_logprobs, (), (self.constants, self.hidden(), ints, ints)
        raise KeyError(key)

    @staticmethod
    def _results(key: Key, arguments: tuple[Any, ...]) -> Any:
        """A pytree of the structure of a program's results."""
        logprobs = LogprobOutput(*[0] * 4)  # pyright: ignore[reportArgumentType]
        match key[0]:
            case "step":
                return *arguments[1:6], 0
            case "steps":
                return *arguments[1:4], 0
            case "full":
                return *arguments[:2], StepOutput(0, logprobs)  # pyright: ignore[reportArgumentType]
            case "admit":
                return arguments[:2]
            case "prompt":
                return logprobs
        return arguments[0]  # features, copy

    def staged(self, least: int = 0) -> jax.ShapeDtypeStruct:
        """Where a step finds its plan: one place for all buckets."""
        return jax.ShapeDtypeStruct((max(self.shapes.buffer_size, least),), jnp.int32)

    def buffers(self, shape: BatchShape) -> StepBuffers:
        """Shapes of what a step leaves for the sampler."""
        hidden = self.hidden(shape.num_tokens)
        return StepBuffers(self._logits(shape.num_rows), _abstract_rows(shape.num_rows), hidden)  # pyright: ignore[reportArgumentType]

    def hidden(self, least: int = 0) -> jax.ShapeDtypeStruct:
        """Where a step leaves its hidden states: one place for all buckets."""
        return jax.ShapeDtypeStruct((max(self.shapes.max_tokens, least), self.hidden_size), self.dtype)

    def _logits(self, num_rows: int) -> jax.ShapeDtypeStruct:
        return self._sharded("logits", (num_rows, self.num_logits), jnp.dtype(jnp.float32), (None, "vocab"))

    def _sharded(
        self, name: str, shape: tuple[int, ...], dtype: jnp.dtype, axes: tuple[str | None, ...]
    ) -> jax.ShapeDtypeStruct:
        """An abstract array that the mesh divides, if there is one."""
        sharding = None if self.mesh is None else sharding_of(name, shape, axes, self.mesh)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    def _step(self, layout: BatchLayout) -> Callable[..., Any]:
        def step(
            constants: Constants,
            caches: list[KVCache],
            tables: jax.Array,
            buffers: StepBuffers,
            carry: Carry,
            staged: jax.Array,
            packed: jax.Array,
        ) -> tuple[list[KVCache], jax.Array, StepBuffers, Carry, jax.Array, jax.Array]:
            staged = _stage(staged, packed, carry)
            logits, batch, hidden, caches, tables, carry, tokens = self._run(
                layout, constants, caches, tables, carry, staged
            )
            hidden = jax.lax.dynamic_update_slice(buffers.hidden, hidden, (0, 0))
            return caches, tables, StepBuffers(logits, batch.rows, hidden), carry, staged, tokens

        return step

    def _steps(self, layout: BatchLayout) -> Callable[..., Any]:
        def steps(
            constants: Constants, caches: list[KVCache], tables: jax.Array, carry: Carry, packed: jax.Array
        ) -> tuple[list[KVCache], jax.Array, Carry, jax.Array]:
            def body(number: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
                caches, tables, carry, tokens = state
                plan = jax.lax.optimization_barrier(jax.lax.dynamic_index_in_dim(packed, number, keepdims=False))
                *_, caches, tables, carry, new = self._run(layout, constants, caches, tables, carry, plan)
                return caches, tables, carry, tokens.at[number].set(new)

            tokens = jnp.zeros((self.decode_steps, layout.shape.num_rows), jnp.int32)
            return jax.lax.fori_loop(0, self.decode_steps, body, (caches, tables, carry, tokens))

        return steps

    def _run(
        self,
        layout: BatchLayout,
        constants: Constants,
        caches: list[KVCache],
        tables: jax.Array,
        carry: Carry,
        plan: jax.Array,
    ) -> tuple[jax.Array, Batch, jax.Array, list[KVCache], jax.Array, Carry, jax.Array]:
        """One step: logits, batch, hidden states; caches, tables and carry; tokens, where the plan samples here."""
        batch = layout.unpack(plan)
        tables = tables.at[batch.update_slots, batch.update_columns].set(batch.update_blocks, mode="drop")
        token_ids, meta = derive_inputs(batch, tables, carry, layout.shape.block_size)
        meta = dataclasses.replace(meta, channel=constants.channel)
        model = self._rebuild(constants)
        hidden, caches = model(token_ids, meta, caches, is_decode=layout.shape.is_decode)
        logits = model.logits(hidden[jnp.maximum(batch.query_start_loc[1:] - 1, 0)])
        rows = batch.rows_to_sample(self.shapes.num_slots)
        options: dict[str, Any] = {"implementation": self.sampling, "axis_name": self.axis_name}
        carry, output = sample_plain(carry, logits, rows, **options)
        return logits, batch, hidden, caches, tables, carry, output.tokens

    def _prompt_logprobs(
        self, constants: Constants, hidden: jax.Array, indices: jax.Array, targets: jax.Array
    ) -> LogprobOutput:
        logits = self._rebuild(constants).logits(hidden[indices])
        return raw_logprobs(gather_columns(logits, self.axis_name, self.shapes.vocab_size), targets)

    def _admit(self, carry: Carry, tables: jax.Array, packed: jax.Array) -> tuple[Carry, jax.Array]:
        part = self.shapes.slot_layout.unpack(packed)
        slots = part["slot_ids"][:, 0]
        carry = Carry(
            last_tokens=carry.last_tokens,
            num_computed=carry.num_computed.at[slots].set(part["num_computed"][:, 0], mode="drop"),
            temperature=carry.temperature.at[slots].set(part["temperature"][:, 0], mode="drop"),
            seeds=carry.seeds.at[slots].set(part["seeds"], mode="drop"),
            uses_features=carry.uses_features.at[slots].set(part["uses_features"][:, 0] != 0, mode="drop"),
        )
        return carry, tables.at[slots].set(part["block_table"], mode="drop")

    def _upload_features(self, features: Features, packed: jax.Array) -> Features:
        part = self.shapes.feature_layout.unpack(packed)
        slots = part.pop("slot_ids")[:, 0]
        rows = features_from_columns(part)
        return jax.tree.map(lambda table, new: table.at[slots].set(new, mode="drop"), features, rows)


def _stage(staged: jax.Array, packed: jax.Array, carry: Carry) -> jax.Array:
    """The plan, at the place of the plan before: one copy reads where the host has put it, and nothing else does.

    The start is 0, which XLA cannot know: it would otherwise let every reader read `packed` itself.
    """
    zero = jnp.minimum(carry.num_computed[0], 0)
    return jax.lax.optimization_barrier(jax.lax.dynamic_update_slice(staged, packed, (zero,)))


def _abstract_rows(num_rows: int) -> Rows:
    ints = jax.ShapeDtypeStruct((num_rows,), jnp.int32)
    return Rows(ints, jax.ShapeDtypeStruct((num_rows,), jnp.bool_), ints)  # pyright: ignore[reportArgumentType]


def copy_blocks(caches: list[KVCache], sources: jax.Array, targets: jax.Array) -> list[KVCache]:
    """Copies blocks, int32 [C] each, padded 0 -> 0; all are read before any is written."""
    return [(k.at[targets].set(k[sources]), v.at[targets].set(v[sources])) for k, v in caches]
