"""Owns what lives on the device and dispatches programs over it. Nothing here decides anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxinfer.batch import (
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
)
from jaxinfer.core import PlanRow, PromptLogprobs, StepPlan, StepResult
from jaxinfer.engine import inputs
from jaxinfer.engine.buckets import BucketLadder
from jaxinfer.engine.memory import leave_holes
from jaxinfer.engine.programs import ADMIT_ROWS, FEATURE_ROWS, PROMPT_ROWS, Key, Programs
from jaxinfer.kernels.all_reduce import Channel, connect
from jaxinfer.layers import KVCache
from jaxinfer.sharding.mesh import own_devices
from jaxinfer.sharding.placement import zeros


@dataclass
class InFlight:
    """A dispatched step: its plan, and outputs that are on their way to the host."""

    plan: StepPlan
    output: StepOutput | None  # None while it is being dispatched
    number: int | None = None  # which of a burst's steps: its tokens are that row of the output's
    prompt_chunks: list[tuple[PlanRow, int, int, LogprobOutput]] = field(default_factory=list)
    """(row, first position, positions, log-probabilities of that many rows)."""


class Runner:
    """Weights, caches, tables and carry, and the order in which programs touch them: of a model, or of a stage of one.

    Args:
      weights: flat list in the model's leaf order.
      programs: compiled forms.
      ladder: buckets.
    """

    def __init__(
        self,
        weights: list[jax.Array],
        programs: Programs,
        ladder: BucketLadder,
    ) -> None:
        self.weights = weights
        self.programs = programs
        self.ladder = ladder
        self.shapes: DeviceShapes = programs.shapes
        self._layouts: dict[BatchShape, BatchLayout] = {}
        self.caches: list[KVCache] = []
        self.tables: jax.Array
        self.carry: Carry
        self.features: Features | None
        self._hidden: jax.Array | None
        self.reset()
        self._holes = leave_holes(own_devices(programs.mesh))

    num_groups = 1
    has_late_tokens = False
    """See `Pipeline`, and `SchedulerLimits`."""

    @property
    def stages(self) -> list[Runner]:
        """Those that a step goes through in this process: see `Pipeline`."""
        return [self]

    @property
    def num_devices(self) -> int:
        mesh = self.programs.mesh
        return 1 if mesh is None else mesh.size

    @property
    def decode_steps(self) -> int:
        """Steps that one program may run."""
        return self.programs.decode_steps

    def reset(self) -> None:
        """A fresh pool, tables and carry; what was there is gone. Zeros: 0 x NaN would poison masked positions."""
        programs = self.programs
        self.caches = []  # free the old ones first
        self.caches = self._zeros(programs.caches)
        self.tables, self.carry, self.features = self._zeros((programs.tables, programs.carry, programs.features))
        self.staged = self._zeros(programs.staged())
        self.constants = Constants(self.weights, self._connect())
        self._rows: dict[int, tuple[jax.Array, Rows]] = {}
        self._hidden = self._zeros(programs.hidden()) if programs.is_last else None

    def _connect(self) -> Channel | None:
        """A new channel: a step that failed may have left half a message in the old one."""
        mesh, wanted = self.programs.mesh, self.programs.channel
        if mesh is None or wanted is None:
            return None
        return connect(mesh, "tensor", rows=wanted.rows, hidden=wanted.hidden, dtype=wanted.dtype)

    def _zeros(self, tree: Any) -> Any:
        return zeros(tree, self.programs.mesh)

    def dispatch(self, plan: StepPlan, packed: np.ndarray | None = None, residual: jax.Array | None = None) -> InFlight:
        """Sends a plan to the device and returns at once; results are on their way.

        Order on the device: block copies read before anything writes, slots get their owners, the step, the sampler.

        Args:
          plan: what to compute.
          packed: what `pack` makes of it, where that is known already.
          residual: what the stage before returned; None for the first.
        """
        self._prepare(plan)
        shape = self.ladder.fit(plan.num_tokens, plan.num_rows)
        buffers, output = self._run_step(shape, plan, packed, residual)
        if plan.needs_full_sampler:
            assert self.features is not None
            sample = self.programs.get(("full", shape.num_rows))
            self.carry, self.features, output = sample(self.carry, self.features, buffers.logits, buffers.rows)
        elif plan.uses_cuts:
            self.carry, output = self.programs.get(("cut", shape.num_rows))(self.carry, buffers.logits, buffers.rows)
        chunks = self._score_prompts(plan, buffers.hidden)
        jax.tree.map(lambda array: array.copy_to_host_async(), (output, [chunk[-1] for chunk in chunks]))
        return InFlight(plan, output, prompt_chunks=chunks)

    def relay(self, plan: StepPlan, packed: np.ndarray, residual: jax.Array | None = None) -> jax.Array:
        """As `dispatch`, of a stage before the last: the residual stream, [T, hidden], for the next one."""
        self._prepare(plan)
        return self._run_relay(self.ladder.fit(plan.num_tokens, plan.num_rows), packed, residual)

    def receive(self, tokens: jax.Array | np.ndarray, slots: np.ndarray) -> None:
        """Takes over tokens that a pipeline's last stage sampled, int32 [S] each; B where a row did not sample."""
        self.carry = self.programs.get(("receive", len(slots)))(self.carry, tokens, slots)

    def pack(self, plan: StepPlan, shape: BatchShape) -> np.ndarray:
        """The plan as the buffer of a step of a bucket that it fits."""
        packed = np.zeros(self.shapes.buffer_size, np.int32)
        is_apart = plan.needs_full_sampler or plan.uses_cuts
        return inputs.pack(plan, self._layout(shape), self.shapes.num_slots, is_sampled_apart=is_apart, into=packed)

    def _prepare(self, plan: StepPlan) -> None:
        self._copy_blocks(plan.copies)
        self._admit([row for row in plan.others if row.is_admission])

    def may_burst(self, plan: StepPlan) -> bool:
        """Whether the plan may be the first of a burst, as far as it alone says."""
        return self._may_burst(plan) and self.programs.has_burst(self.ladder.fit(plan.num_tokens, plan.num_rows))

    def dispatch_burst(self, plans: list[StepPlan]) -> list[InFlight]:
        """Sends plans to the device: with one call if they are decode steps that fit the first one's bucket, and as
        many as the program runs, else one by one.
        """
        if len(plans) < max(2, self.programs.decode_steps):
            return [self.dispatch(plan) for plan in plans]
        shape = self.ladder.fit(plans[0].num_tokens, plans[0].num_rows)
        fits = all(self._may_burst(plan) and plan.num_rows <= shape.num_rows for plan in plans)
        if not (fits and self.programs.has_burst(shape)):
            return [self.dispatch(plan) for plan in plans]
        layout = self._layout(shape)
        tokens = self._run_burst(shape, np.stack([inputs.pack(plan, layout, self.shapes.num_slots) for plan in plans]))
        tokens.copy_to_host_async()
        return [InFlight(plan, StepOutput(tokens, None), number) for number, plan in enumerate(plans)]

    def _may_burst(self, plan: StepPlan) -> bool:
        """Whether every row of the plan goes on with one token, and a burst's step does all that there is to do."""
        return (
            plan.num_rows == plan.num_tokens
            and not plan.needs_full_sampler
            and not (plan.uses_cuts and self.programs.mesh is not None)
            and not plan.copies
            and not any(row.is_admission or row.request.params.prompt_logprobs is not None for row in plan.others)
        )

    def _run_burst(self, shape: BatchShape, packed: np.ndarray) -> jax.Array:
        run = self.programs.get(self.programs.burst_key(shape))
        self.caches, self.tables, self.carry, tokens = run(self.constants, self.caches, self.tables, self.carry, packed)
        return tokens

    def _run_relay(self, shape: BatchShape, packed: np.ndarray, residual: jax.Array | None) -> jax.Array:
        relay, arriving = self.programs.get(self.programs.step_key(shape)), () if residual is None else (residual,)
        state = (self.constants, self.caches, self.tables, self.carry, self.staged, packed, *arriving)
        self.caches, self.tables, self.carry, self.staged, residual = relay(*state)
        assert residual is not None
        return residual

    def _run_step(
        self, shape: BatchShape, plan: StepPlan, packed: np.ndarray | None = None, residual: jax.Array | None = None
    ) -> tuple[StepBuffers, StepOutput]:
        """Runs a plan's step: what it left for a sampler of its own, and its tokens if it did not need one."""
        packed = self.pack(plan, shape) if packed is None else packed
        step, arriving = self.programs.get(self.programs.step_key(shape)), () if residual is None else (residual,)
        old = self._take_buffers(shape)
        state = (self.constants, self.caches, self.tables, old, self.carry, self.staged, packed, *arriving)
        self.caches, self.tables, buffers, self.carry, self.staged, tokens = step(*state)
        self._rows[shape.num_rows] = buffers.logits, buffers.rows
        self._hidden = buffers.hidden
        return buffers, StepOutput(tokens, None)

    def _take_buffers(self, shape: BatchShape) -> StepBuffers:
        """The buffers that the last step of these sizes wrote; new ones the first time."""
        abstract = self.programs.buffers(shape)
        if shape.num_rows not in self._rows:
            self._rows[shape.num_rows] = self._zeros((abstract.logits, abstract.rows))
        return StepBuffers(*self._rows.pop(shape.num_rows), self._hidden)  # pyright: ignore[reportArgumentType]

    def _score_prompts(self, plan: StepPlan, hidden: jax.Array) -> list[tuple[PlanRow, int, int, LogprobOutput]]:
        """Log-probabilities of prompt tokens, where they are asked for; position i's output is about token i + 1."""
        chunks, first = [], len(plan.decodes)  # which are behind their prompts
        for row in plan.others:
            if row.request.params.prompt_logprobs is not None:
                stop = min(row.start + row.num_tokens, row.request.num_prompt_tokens - 1)
                for start in range(row.start, stop, PROMPT_ROWS):
                    count = min(PROMPT_ROWS, stop - start)
                    packed = inputs.pack_prompt(row, first + start - row.start, start + 1, count, PROMPT_ROWS)
                    score = self.programs.get(("prompt",))
                    chunks.append((row, start + 1, count, score(self.constants, hidden, *packed)))
            first += row.num_tokens
        return chunks

    def fetch(self, step: InFlight) -> StepResult:
        """Waits for a step's tokens."""
        assert step.output is not None
        tokens = np.asarray(step.output.tokens)
        tokens = tokens if step.number is None else tokens[step.number]
        plan, num_decodes = step.plan, len(step.plan.decodes)
        prompts = [
            PromptLogprobs(row.request, start, _logprob_rows(output, count))
            for row, start, count, output in step.prompt_chunks
        ]
        of_others = tokens[num_decodes : plan.num_rows].tolist()
        emitted = [self._emitted(row, token) for row, token in zip(plan.others, of_others, strict=True)]
        result = StepResult(emitted, prompt_logprobs=prompts, decode_token_ids=tokens[:num_decodes])
        if plan.wants_logprobs and step.output.logprobs is not None:
            result.logprobs = _logprob_rows(step.output.logprobs, plan.num_rows)
        return result

    @staticmethod
    def _emitted(row: PlanRow, token: int) -> list[int] | None:
        if not row.samples:
            return []
        return [token] if token >= 0 else None

    def warm_up_all(self, repeats: int) -> None:
        """As `warm_up`, with all programs."""
        self.warm_up(self.programs.keys(self.ladder.shapes), repeats)

    def warm_up(self, keys: list[Key], repeats: int) -> None:
        """Runs compiled programs on padding alone, and waits for them."""
        for key in keys:
            for _ in range(repeats):
                self._run_padding(key)
        jax.block_until_ready(self.caches)

    def _run_padding(self, key: Key) -> None:
        """Runs a program on rows that change nothing. A step brings its samplers along."""
        match key:
            case ("relay", *values):
                shape = BatchShape(*values)
                self._run_relay(shape, self.pack(StepPlan(), shape), self._arriving(shape))
            case ("receive", num_rows):
                self.receive(np.zeros(num_rows, np.int32), np.full(num_rows, self.shapes.num_slots, np.int32))
            case ("step", *values):
                shape = BatchShape(*values)
                buffers, out = self._run_step(shape, StepPlan(), residual=self._arriving(shape))
                cut, full = (self.programs.get((kind, shape.num_rows)) for kind in ("cut", "full"))
                self.carry, _ = cut(self.carry, buffers.logits, buffers.rows)
                self.carry, self.features, more = full(self.carry, self.features, buffers.logits, buffers.rows)
                jax.tree.map(np.asarray, (out, more))
            case ("steps", num_steps, *values):
                layout = self._layout(BatchShape(*values))
                padding = inputs.pack(StepPlan(), layout, self.shapes.num_slots)
                np.asarray(self._run_burst(layout.shape, np.stack([padding] * num_steps)))
            case ("prompt",):
                ints = np.zeros(PROMPT_ROWS, np.int32)
                jax.tree.map(np.asarray, self.programs.get(key)(self.constants, self._hidden, ints, ints))
            case ("admit",):
                self._admit_rows([])
            case ("features",):
                self._upload_features([])
            case ("copy", size):
                sources, targets = inputs.pack_copies([], size)
                self.caches = self.programs.get(key)(self.caches, sources, targets)

    def _arriving(self, shape: BatchShape) -> jax.Array | None:
        return None if self.programs.is_first else self.no_residual(shape)

    def no_residual(self, shape: BatchShape) -> jax.Array:
        """Zeros in the place of a residual stream of a step."""
        return self._zeros(self.programs.residual(shape))

    def _layout(self, shape: BatchShape) -> BatchLayout:
        if shape not in self._layouts:
            self._layouts[shape] = BatchLayout(shape)
        return self._layouts[shape]

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        if not copies:
            return
        size = next(size for size in self.programs.copy_sizes if size >= len(copies))
        self.caches = self.programs.get(("copy", size))(self.caches, *inputs.pack_copies(copies, size))

    def _admit(self, rows: list[PlanRow]) -> None:
        for start in range(0, len(rows), ADMIT_ROWS):
            self._admit_rows(rows[start : start + ADMIT_ROWS])
        full = [row for row in rows if row.request.params.needs_full_sampler and self.programs.is_last]
        for start in range(0, len(full), FEATURE_ROWS):
            self._upload_features(full[start : start + FEATURE_ROWS])

    def _admit_rows(self, rows: list[PlanRow]) -> None:
        packed = inputs.pack_slots(rows, self.shapes, ADMIT_ROWS)
        self.carry, self.tables = self.programs.get(("admit",))(self.carry, self.tables, packed)

    def _upload_features(self, rows: list[PlanRow]) -> None:
        packed = inputs.pack_features(rows, self.shapes, FEATURE_ROWS)
        self.features = self.programs.get(("features",))(self.features, packed)


def _logprob_rows(output: LogprobOutput, count: int) -> list[Any]:
    """(logprob, rank, top ids, top values) of the first rows, on the host."""
    chosen, ranks = np.asarray(output.sampled).tolist(), np.asarray(output.ranks).tolist()
    top_ids, top_values = np.asarray(output.top_ids), np.asarray(output.top_values)
    return [(chosen[n], ranks[n], top_ids[n], top_values[n]) for n in range(count)]
