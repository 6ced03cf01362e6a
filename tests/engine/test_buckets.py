"""The ladder: every step has a bucket, the smallest that holds it; the inputs of a step fit into it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxinfer.batch import BatchLayout, BatchShape
from jaxinfer.core import PlanRow, Request, SamplingParams, StepPlan
from jaxinfer.engine.buckets import BucketLadder
from jaxinfer.engine.inputs import pack


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    platform=st.sampled_from(["cpu", "gpu", "tpu"]),
    max_num_seqs=st.integers(1, 300),
    extra=st.integers(0, 9000),
    lengths=st.lists(st.integers(1, 600), min_size=1, max_size=300),
)
def test_every_step_has_the_smallest_bucket(platform, max_num_seqs, extra, lengths):
    budget = max_num_seqs + extra
    ladder = BucketLadder.make(platform, max_num_seqs, budget, 16)
    lengths = lengths[:max_num_seqs]
    while sum(lengths) > budget:
        lengths.pop()
    if not lengths:
        return
    shape = ladder.fit(sum(lengths), len(lengths))
    assert shape.num_tokens >= sum(lengths)
    assert shape.num_rows >= len(lengths)
    assert shape.is_decode == all(length == 1 for length in lengths)
    smaller = [s for s in ladder.shapes if s.num_tokens < shape.num_tokens and s.is_decode == shape.is_decode]
    assert all(s.num_tokens < sum(lengths) or s.num_rows < len(lengths) for s in smaller)
    assert len(ladder.shapes) <= 24


def test_beyond_the_ladder():
    ladder = BucketLadder.make("gpu", 256, 8192, 64)
    assert len(ladder.shapes) <= 22
    with pytest.raises(ValueError, match="no bucket for 9000 tokens in 3 rows"):
        ladder.fit(9000, 3)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 30)), min_size=1, max_size=8),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_packed_inputs_say_what_the_plan_says(rows, block_size):
    """Every field, padding included; new blocks fit into the bucket's table updates."""
    rows = sorted(rows, key=lambda row: row[1] > 1)
    ladder = BucketLadder.make("cpu", 8, 300, block_size)
    plan = StepPlan(num_tokens=sum(new for _, new in rows), num_decodes=sum(new == 1 for _, new in rows))
    for slot, (start, new) in enumerate(rows):
        blocks = list(range(1, -(-(start + new) // block_size) + 1))
        known = list(range(100, 100 + start + new - (new == 1 and start % 2)))
        request = Request("r", [5], SamplingParams(), 4, token_ids=known or [1], block_ids=blocks)
        had = -(-start // block_size)
        plan.rows.append(PlanRow(request, slot, 0, start, new, samples=slot % 2 == 0, first_new_block=had))
    shape = ladder.fit(plan.num_tokens, len(rows))
    layout = BatchLayout(shape)
    part = {name: pack(plan, layout, 8)[where] for name, where in layout.slices.items()}
    ends = np.cumsum([new for _, new in rows])
    assert part["query_start_loc"].tolist()[: len(rows) + 1] == [0, *ends]
    assert set(part["query_start_loc"][len(rows) :]) == {plan.num_tokens}
    assert part["slot_ids"].tolist() == [*range(len(rows)), *[8] * (shape.num_rows - len(rows))]
    assert set(part["token_rows"][plan.num_tokens :]) <= {shape.num_rows}
    updates = list(zip(part["update_slots"], part["update_columns"], part["update_blocks"], strict=True))
    wanted = [
        (row.slot, column, block)
        for row in plan.rows
        for column, block in enumerate(row.request.block_ids)
        if column >= row.first_new_block
    ]
    assert updates[: len(wanted)] == wanted
    assert {slot for slot, _, _ in updates[len(wanted) :]} <= {8}
    for number, row in enumerate(plan.rows):
        tokens = row.request.token_ids[row.start : row.start + row.num_tokens]
        first = part["query_start_loc"][number]
        assert part["token_ids"][first : first + len(tokens)].tolist() == tokens
        assert part["from_carry"][number] == (not tokens)
    assert all(part[name].min() >= 0 for name in part)


def test_updates_never_overflow():
    """n tokens of a row touch at most ceil(n / block) new blocks, whatever their offsets."""
    for tokens, rows, block in [(16, 8, 16), (512, 32, 16), (8, 8, 1), (300, 7, 5)]:
        shape = BatchShape(tokens, rows, tokens == rows, block)
        most = tokens if block == 1 else rows + (tokens - rows) // block
        assert shape.num_updates >= most
