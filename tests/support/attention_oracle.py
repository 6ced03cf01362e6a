"""Attention over a paged cache in NumPy, float64, one query at a time; and ragged batches to try it on."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class Case:
    """A packed batch over a shuffled pool. Slots that hold nothing are NaN, the null block included."""

    q: np.ndarray  # [T, heads, D]
    k_cache: np.ndarray  # [N, kv_heads, block, D]
    v_cache: np.ndarray
    block_tables: np.ndarray  # int32 [S, M]
    seq_lens: np.ndarray  # int32 [S]
    query_start_loc: np.ndarray  # int32 [S + 1]

    def arguments(self) -> tuple[np.ndarray, ...]:
        return self.q, self.k_cache, self.v_cache, self.block_tables, self.seq_lens, self.query_start_loc


def make_case(
    rows: list[tuple[int, int]],
    *,
    kv_heads: int = 2,
    group: int = 2,
    head_dim: int = 16,
    block_size: int = 16,
    padded_tokens: int | None = None,
    padded_rows: int | None = None,
    filler: float = np.nan,
    seed: int = 0,
) -> Case:
    """Args: `rows` are (cached tokens, new tokens)."""
    rng = np.random.default_rng(seed)
    lengths = [cached + new for cached, new in rows]
    num_rows = padded_rows or len(rows)
    num_tokens = padded_tokens or sum(new for _, new in rows)
    counts = [-(-length // block_size) for length in lengths]
    width = max([*counts, 1]) + 1
    num_blocks = sum(counts) + 3
    pool = rng.permutation(np.arange(1, num_blocks))
    shape = (num_blocks, kv_heads, block_size, head_dim)
    k_cache, v_cache = np.full(shape, filler, np.float32), np.full(shape, filler, np.float32)
    tables = np.zeros((num_rows, width), np.int32)
    taken = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        tables[row, :count] = pool[taken : taken + count]
        taken += count
        for position in range(length):
            block, offset = tables[row, position // block_size], position % block_size
            k_cache[block, :, offset] = rng.standard_normal((kv_heads, head_dim))
            v_cache[block, :, offset] = rng.standard_normal((kv_heads, head_dim))
    seq_lens = np.zeros(num_rows, np.int32)
    seq_lens[: len(rows)] = lengths
    starts = np.zeros(num_rows + 1, np.int32)
    starts[1 : len(rows) + 1] = np.cumsum([new for _, new in rows])
    starts[len(rows) + 1 :] = starts[len(rows)]
    q = rng.standard_normal((num_tokens, kv_heads * group, head_dim)).astype(np.float32)
    return Case(q, k_cache, v_cache, tables, seq_lens, starts)


def attend(
    case: Case,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: np.ndarray | None = None,
) -> np.ndarray:
    """float64 [T, heads, D]; zeros for padding tokens."""
    num_tokens, heads, head_dim = case.q.shape
    kv_heads, block_size = case.k_cache.shape[1:3]
    out = np.zeros((num_tokens, heads, head_dim))
    for row in range(len(case.seq_lens)):
        start, stop = case.query_start_loc[row : row + 2]
        for token in range(start, stop):
            position = case.seq_lens[row] - (stop - start) + (token - start)
            first = 0 if window is None else max(0, position - window + 1)
            seen = np.arange(first, position + 1)
            blocks, offsets = case.block_tables[row][seen // block_size], seen % block_size
            for head in range(heads):
                kv = head // (heads // kv_heads)
                keys = case.k_cache[blocks, kv, offsets].astype(np.float64)
                values = case.v_cache[blocks, kv, offsets].astype(np.float64)
                scores = keys @ case.q[token, head].astype(np.float64) * scale
                if softcap is not None:
                    scores = softcap * np.tanh(scores / softcap)
                top = scores.max() if sinks is None else max(scores.max(), sinks[head])
                weights = np.exp(scores - top)
                total = weights.sum() + (0 if sinks is None else np.exp(sinks[head] - top))
                out[token, head] = weights @ values / total
    return out
