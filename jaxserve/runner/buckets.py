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
SMALLEST_MIXED = 64
"""Tokens of the smallest bucket for prompts, where decode steps have programs of their own."""


@dataclass(frozen=True, order=True)
class Bucket:
    """Padded sizes of a step: T tokens, R rows (R <= T)."""

    num_tokens: int
    num_rows: int


@dataclass(frozen=True)
class BucketTable:
    """Buckets in ascending order of tokens."""

    buckets: tuple[Bucket, ...]
    mixed: tuple[Bucket, ...]
    """Those that also hold rows of several tokens."""

    @classmethod
    def build(
        cls, max_num_batched_tokens: int, max_num_seqs: int, *, decode_programs: bool = False
    ) -> BucketTable:
        """One token, powers of two up to the budget, and the budget itself.

        Args:
            max_num_batched_tokens, max_num_seqs: the largest step.
            decode_programs: steps that only decode have programs of their own; then the smallest buckets are for
                them alone, since a prompt's few tokens cost what ``SMALLEST_MIXED`` do.
        """
        sizes = [1] if max_num_batched_tokens > 1 else []
        size = SMALLEST_BATCH
        while size < max_num_batched_tokens:
            sizes.append(size)
            size *= 2
        sizes.append(max_num_batched_tokens)
        buckets = tuple(Bucket(size, min(size, max_num_seqs)) for size in sizes)
        if not decode_programs:
            return cls(buckets, buckets)
        mixed = tuple(bucket for bucket in buckets if bucket.num_tokens >= SMALLEST_MIXED)
        return cls(buckets, mixed or buckets[-1:])

    def smallest(self, num_tokens: int, num_rows: int, *, decode_only: bool = False) -> Bucket:
        """The smallest bucket that holds the batch.

        Args:
            num_tokens, num_rows: the batch's live sizes.
            decode_only: every row has one token.

        Raises:
            ValueError: none does; the scheduler broke its budget.
        """
        buckets = self.buckets if decode_only else self.mixed
        index = bisect.bisect_left(buckets, num_tokens, key=lambda bucket: bucket.num_tokens)
        while index < len(buckets) and buckets[index].num_rows < num_rows:
            index += 1
        if index == len(buckets):
            raise ValueError(f"No bucket holds {num_tokens} tokens in {num_rows} rows.")
        return buckets[index]
