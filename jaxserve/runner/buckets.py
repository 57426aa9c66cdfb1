"""The bucket table: every padded shape a step may have. Warm-up and the batch builder read the same table.

A step's shape is its token count alone: rows follow from it, so the number of programs is linear in the number of
buckets, never a product. Token counts are 1 and powers of two from 8 up to the budget (a step of 2 or 4 tokens costs
what one of 8 does: it reads the same weights); a step that only decodes has as many rows as tokens.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

SMALLEST_BATCH = 8
"""Tokens of the smallest bucket above one."""


@dataclass(frozen=True, order=True)
class Bucket:
    """Padded sizes of a step: T tokens, R rows (R <= T)."""

    num_tokens: int
    num_rows: int


@dataclass(frozen=True)
class BucketTable:
    """Buckets in ascending order of tokens."""

    buckets: tuple[Bucket, ...]

    @classmethod
    def build(cls, max_num_batched_tokens: int, max_num_seqs: int) -> BucketTable:
        """One token, powers of two up to the budget, and the budget itself."""
        sizes = [1] if max_num_batched_tokens > 1 else []
        size = SMALLEST_BATCH
        while size < max_num_batched_tokens:
            sizes.append(size)
            size *= 2
        sizes.append(max_num_batched_tokens)
        return cls(tuple(Bucket(size, min(size, max_num_seqs)) for size in sizes))

    def smallest(self, num_tokens: int, num_rows: int) -> Bucket:
        """The smallest bucket that holds the batch.

        Raises:
            ValueError: none does; the scheduler broke its budget.
        """
        index = bisect.bisect_left(self.buckets, num_tokens, key=lambda bucket: bucket.num_tokens)
        while index < len(self.buckets) and self.buckets[index].num_rows < num_rows:
            index += 1
        if index == len(self.buckets):
            raise ValueError(f"No bucket holds {num_tokens} tokens in {num_rows} rows.")
        return self.buckets[index]
