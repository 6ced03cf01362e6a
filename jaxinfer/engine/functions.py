"""The pure functions that the engine's programs are (`programs` says which; on a mesh, of one device's part)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.batch import (
    Batch,
    BatchLayout,
    Carry,
    Constants,
    DeviceShapes,
    Features,
    LogprobOutput,
    StepBuffers,
    StepOutput,
    features_from_columns,
)
from jaxinfer.engine.derive import derive_inputs
from jaxinfer.layers import KVCache
from jaxinfer.models import DenseModel
from jaxinfer.sampling import raw_logprobs, sample_cut, sample_plain
from jaxinfer.sharding.collectives import columns_to_rows, gather_rows, own_rows


class Functions:
    """What the programs of one model compute.

    Args:
      rebuild: makes the model of its constants.
      shapes: sizes shared by all programs.
      sampling: implementation of `kernels/sampling`.
      axis_name: the mesh axis of the tensor's parts; None on one device.
    """

    def __init__(
        self,
        rebuild: Callable[[Constants], DenseModel],
        shapes: DeviceShapes,
        *,
        sampling: str,
        axis_name: str | None,
    ) -> None:
        self.rebuild = rebuild
        self.shapes = shapes
        self.sampler_options: dict[str, Any] = {
            "implementation": sampling,
            "axis_name": axis_name,
            "vocab_size": shapes.vocab_size,
        }

    def step(self, layout: BatchLayout) -> Callable[..., Any]:
        """The program `step` of a bucket."""

        def step(
            constants: Constants,
            caches: list[KVCache],
            tables: jax.Array,
            buffers: StepBuffers,
            carry: Carry,
            staged: jax.Array,
            packed: jax.Array,
            residual: jax.Array | None = None,
        ) -> tuple[list[KVCache], jax.Array, StepBuffers, Carry, jax.Array, jax.Array]:
            staged = _stage(staged, packed, carry)
            logits, batch, hidden, caches, tables, carry, tokens = self._run(
                layout, constants, caches, tables, carry, staged, sample_plain, residual
            )
            hidden = jax.lax.dynamic_update_slice(buffers.hidden, hidden, (0, 0))
            return caches, tables, StepBuffers(logits, batch.rows, hidden), carry, staged, tokens

        return step

    def relay(self, layout: BatchLayout) -> Callable[..., Any]:
        """The program `relay` of a bucket: a step's share of a stage that others follow."""

        def relay(
            constants: Constants,
            caches: list[KVCache],
            tables: jax.Array,
            carry: Carry,
            staged: jax.Array,
            packed: jax.Array,
            residual: jax.Array | None = None,
        ) -> tuple[list[KVCache], jax.Array, Carry, jax.Array, jax.Array]:
            staged = _stage(staged, packed, carry)
            batch, _, residual, caches, tables = self._run_layers(
                layout, constants, caches, tables, carry, staged, residual
            )
            rows = batch.rows
            num_computed = carry.num_computed.at[rows.slot_ids].add(rows.num_tokens, mode="drop")
            return caches, tables, dataclasses.replace(carry, num_computed=num_computed), staged, residual

        return relay

    def steps(self, layout: BatchLayout, num_steps: int) -> Callable[..., Any]:
        """The program `steps` of a bucket. Its sampler also cuts, unless devices had to exchange rows for it."""
        sampler = sample_plain if self.sampler_options["axis_name"] is not None else sample_cut

        def steps(
            constants: Constants, caches: list[KVCache], tables: jax.Array, carry: Carry, packed: jax.Array
        ) -> tuple[list[KVCache], jax.Array, Carry, jax.Array]:
            def body(number: jax.Array, state: tuple[Any, ...]) -> tuple[Any, ...]:
                caches, tables, carry, tokens = state
                plan = jax.lax.optimization_barrier(jax.lax.dynamic_index_in_dim(packed, number, keepdims=False))
                *_, caches, tables, carry, new = self._run(layout, constants, caches, tables, carry, plan, sampler)
                return caches, tables, carry, tokens.at[number].set(new)

            tokens = jnp.zeros((num_steps, layout.shape.num_rows), jnp.int32)
            return jax.lax.fori_loop(0, num_steps, body, (caches, tables, carry, tokens))

        return steps

    def _run(
        self,
        layout: BatchLayout,
        constants: Constants,
        caches: list[KVCache],
        tables: jax.Array,
        carry: Carry,
        plan: jax.Array,
        sampler: Callable[..., tuple[Carry, StepOutput]],
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, Batch, jax.Array, list[KVCache], jax.Array, Carry, jax.Array]:
        """One step: logits, batch, hidden states; caches, tables and carry; tokens, where the plan samples here."""
        batch, model, hidden, caches, tables = self._run_layers(
            layout, constants, caches, tables, carry, plan, residual
        )
        logits = model.logits(hidden[jnp.maximum(batch.query_start_loc[1:] - 1, 0)])
        rows = batch.rows_to_sample(self.shapes.num_slots)
        carry, output = sampler(carry, logits, rows, **self.sampler_options)
        return logits, batch, hidden, caches, tables, carry, output.tokens

    def _run_layers(
        self,
        layout: BatchLayout,
        constants: Constants,
        caches: list[KVCache],
        tables: jax.Array,
        carry: Carry,
        plan: jax.Array,
        residual: jax.Array | None,
    ) -> tuple[Batch, DenseModel, jax.Array, list[KVCache], jax.Array]:
        """The model over a plan's tokens: batch, model, what its last layer gives; caches and tables."""
        batch = layout.unpack(plan)
        tables = tables.at[batch.update_slots, batch.update_columns].set(batch.update_blocks, mode="drop")
        token_ids, meta = derive_inputs(batch, tables, carry, layout.shape.block_size)
        meta = dataclasses.replace(meta, channel=constants.channel)
        model = self.rebuild(constants)
        hidden, caches = model(token_ids, meta, caches, is_decode=layout.shape.is_decode, residual=residual)
        return batch, model, hidden, caches, tables

    def prompt_logprobs(
        self, constants: Constants, hidden: jax.Array, indices: jax.Array, targets: jax.Array
    ) -> LogprobOutput:
        axis_name = self.sampler_options["axis_name"]
        logits = self.rebuild(constants).logits(hidden[indices])
        logits = columns_to_rows(logits, axis_name, self.shapes.vocab_size)
        output = raw_logprobs(logits, own_rows(targets, axis_name))
        return jax.tree.map(lambda part: gather_rows(part, axis_name, targets.shape[0]), output)

    def admit(self, carry: Carry, tables: jax.Array, packed: jax.Array) -> tuple[Carry, jax.Array]:
        part = self.shapes.slot_layout.unpack(packed)
        slots = part["slot_ids"][:, 0]
        carry = Carry(
            last_tokens=carry.last_tokens,
            num_computed=carry.num_computed.at[slots].set(part["num_computed"][:, 0], mode="drop"),
            temperature=carry.temperature.at[slots].set(part["temperature"][:, 0], mode="drop"),
            seeds=carry.seeds.at[slots].set(part["seeds"], mode="drop"),
            min_p=carry.min_p.at[slots].set(part["min_p"][:, 0], mode="drop"),
            top_k=carry.top_k.at[slots].set(part["top_k"][:, 0], mode="drop"),
            top_p=carry.top_p.at[slots].set(part["top_p"][:, 0], mode="drop"),
            uses_features=carry.uses_features.at[slots].set(part["uses_features"][:, 0] != 0, mode="drop"),
        )
        return carry, tables.at[slots].set(part["block_table"], mode="drop")

    def upload_features(self, features: Features, packed: jax.Array) -> Features:
        part = self.shapes.feature_layout.unpack(packed)
        slots = part.pop("slot_ids")[:, 0]
        rows = features_from_columns(part)
        return jax.tree.map(lambda table, new: table.at[slots].set(new, mode="drop"), features, rows)


def _stage(staged: jax.Array, packed: jax.Array, carry: Carry) -> jax.Array:
    """The plan, at the place of the plan before: one copy reads where the host has put it, and nothing else does.

    Args:
      staged: longer than `packed`, by what is not read.

    The start is 0, which XLA cannot know: it would otherwise let every reader read `packed` itself.
    """
    zero = jnp.minimum(carry.num_computed[0], 0)
    return jax.lax.optimization_barrier(jax.lax.dynamic_update_slice(staged, packed, (zero,)))


def receive(carry: Carry, tokens: jax.Array, slots: jax.Array) -> Carry:
    """Takes over what a pipeline's last stage sampled: int32 [S] each; rows without a token have slot B."""
    return dataclasses.replace(carry, last_tokens=carry.last_tokens.at[slots].set(tokens, mode="drop"))


def copy_blocks(caches: list[KVCache], sources: jax.Array, targets: jax.Array) -> list[KVCache]:
    """Copies blocks, int32 [C] each, padded 0 -> 0; all are read before any is written."""
    return [(k.at[targets].set(k[sources]), v.at[targets].set(v[sources])) for k, v in caches]
