"""The device's vocabulary: what a step reads (`Batch`), keeps (`Carry`, `Features`) and says (`StepOutput`).

Letters in shape comments:
  T  tokens of the step, padded to a bucket        S  rows (requests) of the step, padded to a bucket
  B  request slots (max_num_seqs)                  M  blocks a request may have at most
  U  block-table entries a step may add            L  longest request (max_model_len)
  V  vocabulary                                    K  MAX_LOGPROBS

Padding rows have slot B, padding tokens row S: both are out of range, so gathers fill and scatters drop. No index is
ever negative: jax wraps -1.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple, dataclass_transform

import jax
import jax.numpy as jnp

from jaxinfer.core import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, MAX_END_IDS, MAX_LOGIT_BIAS, MAX_LOGPROBS


@dataclass_transform(frozen_default=True)
def pytree_dataclass[C](cls: type[C]) -> type[C]:
    """A frozen dataclass whose fields are pytree children."""
    cls = dataclass(frozen=True)(cls)
    names = [item.name for item in fields(cls)]  # pyright: ignore[reportArgumentType]
    jax.tree_util.register_dataclass(cls, data_fields=names, meta_fields=[])
    return cls


class BatchShape(NamedTuple):
    """A bucket: padded tokens and rows, whether every row has one token, and the block size, which bounds the table
    entries of a step.
    """

    num_tokens: int  # T
    num_rows: int  # S
    is_decode: bool
    block_size: int

    @property
    def num_updates(self) -> int:
        """U: n tokens of a row touch at most ceil(n / block_size) new blocks."""
        return self.num_rows + self.num_tokens // self.block_size


class BatchLayout:
    """Where each field of a bucket lies in the one int32 buffer that a step transfers."""

    def __init__(self, shape: BatchShape) -> None:
        t, s, u = shape.num_tokens, shape.num_rows, shape.num_updates
        lengths = {
            "token_ids": t,
            "token_rows": t,
            "query_start_loc": s + 1,
            "slot_ids": s,
            "samples": s,
            "from_carry": s,
            "update_slots": u,
            "update_columns": u,
            "update_blocks": u,
            "num_decodes": 1,
            "is_sampled_apart": 1,
        }
        self.shape = shape
        self.slices: dict[str, slice] = {}
        start = 0
        for name, length in lengths.items():
            self.slices[name] = slice(start, start + length)
            start += length
        self.size = start

    def unpack(self, buffer: jax.Array) -> Batch:
        """int32 [size] -> `Batch`, inside a jitted step."""
        part = {name: buffer[where] for name, where in self.slices.items()}
        part["samples"] = part["samples"] != 0
        part["from_carry"] = part["from_carry"] != 0
        part["is_sampled_apart"] = part["is_sampled_apart"] != 0
        return Batch(**part)


@pytree_dataclass
class Batch:
    """One step's rows. Rows with a single token come first; tokens are packed, row after row."""

    token_ids: jax.Array  # int32 [T]; 0 where the token is still on the device only
    token_rows: jax.Array  # int32 [T]; S for padding
    query_start_loc: jax.Array  # int32 [S + 1]; repeats its last value for padding rows
    slot_ids: jax.Array  # int32 [S]; B for padding
    samples: jax.Array  # bool [S]: the row's last token is to be followed by a new one
    from_carry: jax.Array  # bool [S]: the row's token is the one its slot sampled last
    update_slots: jax.Array  # int32 [U]; B for padding
    update_columns: jax.Array  # int32 [U]
    update_blocks: jax.Array  # int32 [U]
    num_decodes: jax.Array  # int32 [1]: leading rows with one token
    is_sampled_apart: jax.Array  # bool [1]: sampling, and what it does to the carry, is another program's

    @property
    def rows(self) -> Rows:
        return Rows(self.slot_ids, self.samples, self.query_start_loc[1:] - self.query_start_loc[:-1])

    def rows_to_sample(self, num_slots: int) -> Rows:
        """The rows that the step samples itself: all or none, which are then padding, of slot `num_slots`."""
        skips = self.is_sampled_apart
        rows = self.rows
        slot_ids = jnp.where(skips, num_slots, rows.slot_ids)
        return Rows(slot_ids, rows.samples & ~skips, jnp.where(skips, 0, rows.num_tokens))


@pytree_dataclass
class Constants:
    """What every step reads and none returns."""

    weights: list[jax.Array]  # in the model's leaf order
    channel: Any = None  # see `AttentionMetadata`


@pytree_dataclass
class StepBuffers:
    """What a step leaves for the sampler, in buffers that steps of these sizes write again and again. Donated."""

    logits: jax.Array  # float32 [S, V]
    rows: Rows
    hidden: jax.Array  # [T of the largest bucket, hidden]: the last layer's normalised output, in the first T rows


@pytree_dataclass
class Rows:
    """What the sampler needs of a batch: its programs depend on S alone."""

    slot_ids: jax.Array  # int32 [S]
    samples: jax.Array  # bool [S]
    num_tokens: jax.Array  # int32 [S]: tokens the step computed


@pytree_dataclass
class Carry:
    """What the next step needs of this one, by request slot. Donated."""

    last_tokens: jax.Array  # int32 [B]: the token sampled last
    num_computed: jax.Array  # int32 [B]: tokens whose K and V are in the cache
    temperature: jax.Array  # float32 [B]: 0 is greedy
    seeds: jax.Array  # uint32 [B, 2]: low and high word
    min_p: jax.Array  # float32 [B]: 0 is off
    top_k: jax.Array  # int32 [B]: V or more is off
    top_p: jax.Array  # float32 [B]: 1 is off
    uses_features: jax.Array  # bool [B]: the slot's row of `Features` is its owner's, not a former one's


@pytree_dataclass
class Features:
    """What only the full sampler needs, by request slot. Donated. Unused list entries hold V, or -1 in words."""

    history: jax.Array  # int32 [B, L]: prompt and output tokens
    prompt_lens: jax.Array  # int32 [B]
    min_lens: jax.Array  # int32 [B]: no end id before this many tokens (prompt + min_tokens)
    presence_penalty: jax.Array  # float32 [B]
    frequency_penalty: jax.Array  # float32 [B]
    repetition_penalty: jax.Array  # float32 [B]
    bias_ids: jax.Array  # int32 [B, MAX_LOGIT_BIAS]
    bias_values: jax.Array  # float32 [B, MAX_LOGIT_BIAS]
    end_ids: jax.Array  # int32 [B, MAX_END_IDS]
    bad_words: jax.Array  # int32 [B, MAX_BAD_WORDS, MAX_BAD_WORD_LEN], aligned right
    allowed: jax.Array  # int32 [B, ceil(V / 32)]: bits, lowest first


@pytree_dataclass
class AttentionMetadata:
    """What attention and the KV write need to know, derived once a step."""

    positions: jax.Array  # int32 [T]: absolute; 0 for padding
    slot_mapping: jax.Array  # int32 [T]: where K and V go, block * block_size + offset; 0 for padding
    block_tables: jax.Array  # int32 [S, M]
    seq_lens: jax.Array  # int32 [S]: this step's tokens included; 0 for padding
    query_start_loc: jax.Array  # int32 [S + 1]
    plan: Any = None  # what the attention kernel works out once a step
    update_plan: Any = None  # what the KV write works out once a step
    channel: Any = None  # what the all-reduce kernel sends messages through, on a mesh that uses it


@pytree_dataclass
class StepOutput:
    """What a step says. `tokens` is -1 where no token could be chosen (all logits -inf, or NaN)."""

    tokens: jax.Array  # int32 [S]
    logprobs: LogprobOutput | None


@pytree_dataclass
class LogprobOutput:
    """Raw log-probabilities of the sampled token and of the K best."""

    sampled: jax.Array  # float32 [S]
    ranks: jax.Array  # int32 [S]: 1 is best
    top_ids: jax.Array  # int32 [S, K]
    top_values: jax.Array  # float32 [S, K]


class SlotLayout:
    """How one slot's row of `Carry` and block table, or of `Features`, lies in a packed int32 row.

    Floats travel as their bits. Column 0 is the slot itself, B for a padding row.
    """

    def __init__(self, **lengths: tuple[int, Any]) -> None:
        self.columns: dict[str, tuple[slice, Any]] = {"slot_ids": (slice(0, 1), jnp.int32)}
        start = 1
        for name, (length, dtype) in lengths.items():
            self.columns[name] = (slice(start, start + length), dtype)
            start += length
        self.width = start

    def unpack(self, rows: jax.Array) -> dict[str, jax.Array]:
        """int32 [R, width] -> name -> [R, length] in the field's dtype."""
        return {
            name: jax.lax.bitcast_convert_type(rows[:, where], dtype) for name, (where, dtype) in self.columns.items()
        }


class DeviceShapes(NamedTuple):
    """The sizes that every program of an engine shares."""

    num_slots: int  # B
    max_blocks: int  # M
    max_len: int  # L
    vocab_size: int  # V
    buffer_size: int = 0  # integers of the largest bucket's buffer
    max_tokens: int = 0  # of the largest bucket

    @property
    def num_mask_words(self) -> int:
        return -(-self.vocab_size // 32)

    @property
    def slot_layout(self) -> SlotLayout:
        return SlotLayout(
            num_computed=(1, jnp.int32),
            temperature=(1, jnp.float32),
            seeds=(2, jnp.uint32),
            min_p=(1, jnp.float32),
            top_k=(1, jnp.int32),
            top_p=(1, jnp.float32),
            uses_features=(1, jnp.int32),
            block_table=(self.max_blocks, jnp.int32),
        )

    @property
    def feature_layout(self) -> SlotLayout:
        return SlotLayout(
            prompt_lens=(1, jnp.int32),
            min_lens=(1, jnp.int32),
            presence_penalty=(1, jnp.float32),
            frequency_penalty=(1, jnp.float32),
            repetition_penalty=(1, jnp.float32),
            bias_ids=(MAX_LOGIT_BIAS, jnp.int32),
            bias_values=(MAX_LOGIT_BIAS, jnp.float32),
            end_ids=(MAX_END_IDS, jnp.int32),
            bad_words=(MAX_BAD_WORDS * MAX_BAD_WORD_LEN, jnp.int32),
            allowed=(self.num_mask_words, jnp.int32),
            history=(self.max_len, jnp.int32),
        )

    def zero_carry(self) -> Carry:
        b = self.num_slots
        return Carry(
            last_tokens=jnp.zeros((b,), jnp.int32),
            num_computed=jnp.zeros((b,), jnp.int32),
            temperature=jnp.zeros((b,), jnp.float32),
            seeds=jnp.zeros((b, 2), jnp.uint32),
            min_p=jnp.zeros((b,), jnp.float32),
            top_k=jnp.zeros((b,), jnp.int32),
            top_p=jnp.zeros((b,), jnp.float32),
            uses_features=jnp.zeros((b,), jnp.bool_),
        )

    def zero_features(self) -> Features:
        shapes = {
            name: (where.stop - where.start, dtype) for name, (where, dtype) in self.feature_layout.columns.items()
        }
        made = {name: jnp.zeros((self.num_slots, n), dtype) for name, (n, dtype) in shapes.items()}
        del made["slot_ids"]
        return features_from_columns(made)


def features_from_columns(columns: dict[str, jax.Array]) -> Features:
    """Name -> [R, length] -> `Features` with R rows: single columns lose their axis, words get theirs."""
    shaped = {
        name: value[:, 0] if value.shape[1] == 1 and name not in ("history", "allowed") else value
        for name, value in columns.items()
    }
    words = shaped.pop("bad_words")
    return Features(**shaped, bad_words=words.reshape(-1, MAX_BAD_WORDS, MAX_BAD_WORD_LEN))


__all__ = [
    "MAX_LOGPROBS",
    "AttentionMetadata",
    "Batch",
    "BatchLayout",
    "BatchShape",
    "Carry",
    "Constants",
    "DeviceShapes",
    "Features",
    "LogprobOutput",
    "Rows",
    "SlotLayout",
    "StepBuffers",
    "StepOutput",
    "features_from_columns",
]
