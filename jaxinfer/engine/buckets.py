"""The ladder of padded shapes. Every shape on it is one compiled step; its rows alone key the sampler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jaxinfer.batch import BatchShape

FEW_ROWS_BELOW = 1024
"""Larger mixed steps come with all rows only: what the head saves with few is little beside them, and every mixed
bucket takes seconds to lower."""


@dataclass(frozen=True)
class BucketLadder:
    """Row and token buckets, ascending.

    A decode step (one token a row) has as many tokens as rows. Others are mixed; they come with all rows and, if they
    are small, with few, which keeps the ladder short. 192 rows: an 8B layer's products take an H200 123 us for
    128 rows, 137 for 192 and 171 for 256, with norms, SiLU and sums.
    """

    row_buckets: tuple[int, ...]
    token_buckets: tuple[int, ...]
    block_size: int

    @classmethod
    def make(cls, platform: str, max_num_seqs: int, max_num_batched_tokens: int, block_size: int) -> BucketLadder:
        """The ladder for a platform: on accelerators nothing below 16, since a GEMM of one row is slower there."""
        if platform == "cpu":
            rows, tokens = [1, 8], [16, 64, 256]
        else:
            rows, tokens = [16, 32, 64, 128, 192], [64]
            while tokens[-1] < max_num_batched_tokens:
                tokens.append(2 * tokens[-1])
        rows = [size for size in rows if size < max_num_seqs] + [max_num_seqs]
        tokens = [size for size in tokens if size < max_num_batched_tokens] + [max_num_batched_tokens]
        return cls(tuple(rows), tuple(tokens), block_size)

    def fit(self, num_tokens: int, num_rows: int) -> BatchShape:
        """The smallest bucket for a step: fewest padded tokens, then fewest rows.

        Raises:
          ValueError: beyond the ladder.
        """
        is_decode = num_tokens == num_rows
        fitting = [
            shape
            for shape in self.shapes
            if shape.num_tokens >= num_tokens and shape.num_rows >= num_rows and shape.is_decode == is_decode
        ]
        if not fitting:
            raise ValueError(f"no bucket for {num_tokens} tokens in {num_rows} rows")
        return fitting[-1]

    @cached_property
    def shapes(self) -> tuple[BatchShape, ...]:
        """Every bucket, the largest first."""
        kinds = {(size, size, True) for size in self.row_buckets}
        for tokens in self.token_buckets:
            most = max((size for size in self.row_buckets if size <= tokens), default=tokens)
            kinds.add((tokens, most, False))
            if tokens < FEW_ROWS_BELOW:
                kinds.add((tokens, min(self.row_buckets[0], tokens), False))
        return tuple(BatchShape(*kind, self.block_size) for kind in sorted(kinds, reverse=True))
