"""A plan, as the int32 buffers that the device reads. NumPy only; every call fills fresh memory.

A buffer is never rewritten: jax may still be reading it (on a CPU it even aliases it).
"""

from __future__ import annotations

import numpy as np

from jaxinfer.batch import BatchLayout, DeviceShapes, SlotLayout
from jaxinfer.core import MAX_BAD_WORD_LEN, MAX_BAD_WORDS, DecodeRows, PlanRow, Request, SamplingParams, StepPlan


def pack(
    plan: StepPlan,
    layout: BatchLayout,
    num_slots: int,
    *,
    is_sampled_apart: bool = False,
    into: np.ndarray | None = None,
) -> np.ndarray:
    """The step's buffer, int32 [layout.size].

    Args:
      plan: rows within the layout's bucket.
      layout: of the bucket.
      num_slots: B, the slot of padding rows.
      is_sampled_apart: another program samples the rows.
      into: zeros that are at least as long, to be filled instead of fresh ones.
    """
    buffer = np.zeros(layout.size, np.int32) if into is None else into
    part = {name: buffer[where] for name, where in layout.slices.items()}
    part["token_rows"][:] = layout.shape.num_rows
    part["slot_ids"][:] = num_slots
    part["update_slots"][:] = num_slots
    part["num_decodes"][0] = plan.num_decodes
    part["is_sampled_apart"][0] = is_sampled_apart
    _pack_decodes(plan.decodes, part)
    _pack_others(plan.others, part, len(plan.decodes))
    part["query_start_loc"][plan.num_rows + 1 :] = plan.num_tokens
    updates = plan.decodes.new_blocks + _new_blocks(plan.others)
    if updates:
        names = ("update_slots", "update_columns", "update_blocks")
        for name, column in zip(names, np.array(updates, np.int32).T, strict=True):
            part[name][: len(updates)] = column
    return buffer


def _pack_decodes(rows: DecodeRows, part: dict[str, np.ndarray]) -> None:
    """The leading rows: row r is token r."""
    if not rows:
        return
    count = len(rows)
    numbers = np.arange(count + 1)
    part["query_start_loc"][: count + 1] = numbers
    part["token_rows"][:count] = numbers[:count]
    part["slot_ids"][:count] = rows.slots
    part["samples"][:count] = 1
    part["from_carry"][:count] = rows.from_carry
    part["token_ids"][:count] = rows.token_ids


def _pack_others(rows: list[PlanRow], part: dict[str, np.ndarray], first: int) -> None:
    """Rows `first` and on; before them are as many tokens."""
    if not rows:
        return
    lengths = [row.num_tokens for row in rows]
    where, end = slice(first, first + len(rows)), first + sum(lengths)
    part["query_start_loc"][first + 1 : where.stop + 1] = first + np.cumsum(lengths)
    part["token_rows"][first:end] = np.repeat(np.arange(first, where.stop), lengths)
    part["slot_ids"][where] = [row.slot for row in rows]
    part["samples"][where] = [row.samples for row in rows]
    part["from_carry"][where] = [row.start >= row.request.num_tokens for row in rows]
    part["token_ids"][first:end] = _token_ids(rows)


def _token_ids(rows: list[PlanRow]) -> list[int]:
    """The step's tokens in order; 0 for those that only the device knows."""
    ids: list[int] = []
    for row in rows:
        known = row.request.token_ids[row.start : row.start + row.num_tokens]
        ids += known
        if len(known) < row.num_tokens:
            ids += [0] * (row.num_tokens - len(known))
    return ids


def _new_blocks(rows: list[PlanRow]) -> list[tuple[int, int, int]]:
    """(slot, column, block) of what running rows were given by this plan; admitted rows upload their whole table."""
    return [
        (row.slot, column, row.request.block_ids[column])
        for row in rows
        if not row.is_admission and row.first_new_block < len(row.request.block_ids)
        for column in range(row.first_new_block, len(row.request.block_ids))
    ]


def pack_slots(rows: list[PlanRow], shapes: DeviceShapes, num_rows: int) -> np.ndarray:
    """Admitted rows' slots for the `admit` program, int32 [num_rows, width]."""
    layout = shapes.slot_layout
    packed = _padding(layout, num_rows, shapes.num_slots)
    for line, row in zip(packed, rows, strict=False):
        request = row.request
        _put(line, layout, "slot_ids", row.slot)
        _put(line, layout, "num_computed", row.start)
        _put(line, layout, "temperature", request.params.temperature)
        _put(line, layout, "seeds", [request.seed & 0xFFFFFFFF, request.seed >> 32 & 0xFFFFFFFF])
        for name, value in cut_values(request.params).items():
            _put(line, layout, name, value)
        _put(line, layout, "uses_features", int(request.params.needs_full_sampler))
        table = line[layout.columns["block_table"][0]]
        table[: len(request.block_ids)] = request.block_ids
    return packed


def pack_features(rows: list[PlanRow], shapes: DeviceShapes, num_rows: int) -> np.ndarray:
    """Admitted rows' sampler features for the `features` program, int32 [num_rows, width]."""
    layout = shapes.feature_layout
    packed = _padding(layout, num_rows, shapes.num_slots)
    for line, row in zip(packed, rows, strict=False):
        _put(line, layout, "slot_ids", row.slot)
        for name, value in feature_values(row.request, shapes).items():
            _put(line, layout, name, value)
    return packed


def cut_values(params: SamplingParams) -> dict[str, float]:
    """A request's cuts, by field of `Carry`."""
    most = int(np.iinfo(np.int32).max)
    return {
        "min_p": params.min_p,
        "top_k": most if params.top_k <= 0 else min(params.top_k, most),
        "top_p": max(params.top_p, float(np.finfo(np.float32).tiny)),  # 0 in float32 would cut the best token too
    }


def feature_values(request: Request, shapes: DeviceShapes) -> dict[str, object]:
    """A request's `Features`, by field; lists are as long as they are, the rest of a field is filled up here."""
    params, vocab = request.params, shapes.vocab_size
    bias = params.logit_bias or {}
    words = np.full((MAX_BAD_WORDS, MAX_BAD_WORD_LEN), -1, np.int32)
    for number, word in enumerate(request.bad_word_ids):
        words[number, MAX_BAD_WORD_LEN - len(word) :] = word
    history = np.zeros(shapes.max_len, np.int32)
    history[: request.num_tokens] = request.token_ids
    return {
        "prompt_lens": request.num_prompt_tokens,
        "min_lens": request.num_prompt_tokens + params.min_tokens,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "bias_ids": _filled(list(bias), vocab, shapes, "bias_ids"),
        "bias_values": _filled(list(bias.values()), 0.0, shapes, "bias_values"),
        "end_ids": _filled(sorted(request.end_token_ids), vocab, shapes, "end_ids"),
        "bad_words": words.reshape(-1),
        "allowed": _allowed_mask(params.allowed_token_ids, shapes),
        "history": history,
    }


def _filled(values: list, filler: float, shapes: DeviceShapes, name: str) -> np.ndarray:
    where, dtype = shapes.feature_layout.columns[name]
    full = np.full(where.stop - where.start, filler, dtype)
    full[: len(values)] = values
    return full


def _allowed_mask(allowed: object, shapes: DeviceShapes) -> np.ndarray:
    if allowed is None:
        return np.full(shapes.num_mask_words, -1, np.int32)
    bits = np.zeros(shapes.num_mask_words * 32, np.uint8)
    bits[np.asarray(allowed, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def _padding(layout: SlotLayout, num_rows: int, num_slots: int) -> np.ndarray:
    packed = np.zeros((num_rows, layout.width), np.int32)
    packed[:, 0] = num_slots
    return packed


def _put(line: np.ndarray, layout: SlotLayout, name: str, value: object) -> None:
    where, dtype = layout.columns[name]
    line[where] = np.atleast_1d(np.asarray(value, dtype)).view(np.int32)


def pack_copies(copies: list[tuple[int, int]], size: int) -> tuple[np.ndarray, np.ndarray]:
    """(sources, targets), int32 [size] each, padded 0 -> 0."""
    both = np.zeros((2, size), np.int32)
    if copies:
        both[:, : len(copies)] = np.array(copies, np.int32).T
    return both[0], both[1]


def pack_prompt(row: PlanRow, index: int, position: int, count: int, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of the step's hidden states and the prompt tokens that follow them, int32 [size] each, padded with 0."""
    indices, targets = np.zeros((2, size), np.int32)
    indices[:count] = np.arange(index, index + count)
    targets[:count] = row.request.prompt_token_ids[position : position + count]
    return indices, targets
