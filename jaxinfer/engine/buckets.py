"""The ladder of padded shapes. Every (T, S) pair on it is one compiled step; S alone keys the sampler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jaxinfer.batch import BatchShape


@dataclass(frozen=True)
class BucketLadder:
    """Token and row buckets, ascending. A step with as many token as row slots is a decode step; longer ones mix.

    Mixed steps come with few or with all rows only, which keeps the ladder short.
    """

    row_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    block_size: int

    @classmethod
    def make(cls, platform: str, max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> BucketLadder:
        """The ladder for a platform: on accelerators nothing below 16 (a GEMM of one row is slower than one of 16)."""
        if platform == "cpu":
            rows, tokens = [1, 8], [16, 64, 256]
        else:
            rows, tokens = [16, 32, 64, 128], [64]
            while tokens[-1] < max_num_batched_tokens:
                tokens.append(2 * tokens[-1])
        rows = [size for size in rows if size < max_num_seqs] + [max_num_seqs]
        tokens = [size for size in tokens if rows[0] < size < max_num_batched_tokens] + [max_num_batched_tokens]
        return cls(tuple(rows), tuple(tokens), block_size)

    def fit(self, num_tokens: int, num_rows: int) -> BatchShape:
        """The smallest bucket for a step: fewest padded tokens, then fewest rows.

        Raises:
          ValueError: beyond the ladder.
        """
        fitting = [shape for shape in self.shapes if shape.num_tokens >= num_tokens and shape.num_rows >= num_rows]
        if not fitting:
            raise ValueError(f"no bucket for {num_tokens} tokens in {num_rows} rows")
        return fitting[-1]

    @cached_property
    def shapes(self) -> tuple[BatchShape, ...]:
        """Every bucket, the largest first."""
        pairs = {(size, size) for size in self.row_buckets}
        for tokens in self.token_buckets:
            most = max(size for size in self.row_buckets if size <= tokens)
            pairs |= {(tokens, self.row_buckets[0]), (tokens, most)}
        return tuple(BatchShape(tokens, rows, self.block_size) for tokens, rows in sorted(pairs, reverse=True))
