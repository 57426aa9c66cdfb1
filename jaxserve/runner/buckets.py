"""The bucket table: every padded shape a step may have. Warm-up and the batch builder read the same table.

A step's shape is its token count alone: rows follow from it, so the number of programs is linear in the number of
buckets, never a product. Token counts are 1 and powers of two from 8 up to the budget (a step of 2 or 4 tokens costs
what one of 8 does: it reads the same weights); a step that only decodes has as many rows as tokens. A fine table has
further sizes where arithmetic begins to limit a step, and padding costs what tokens do; a batch-invariant engine's of
decode steps only those that it has of others.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

SMALLEST_BATCH = 8
"""Tokens of the smallest bucket above one."""
SMALLEST_MIXED = 64
"""Tokens of the smallest bucket for prompts, where decode steps have programs of their own."""

FINE_DECODE = (192, 384, 640, 768, 896)
"""Rows for which a fine table has decode steps, beside powers of two."""
FINE_MIXED = 256
"""Tokens from which on arithmetic limits a step, so that it takes as long as its padded size says. From here on a fine
table has half steps for prompts."""
TRIMMED = 2048
"""Tokens from which on it has none where steps are trimmed to its sizes: what is put off costs a large step little."""


@dataclass(frozen=True, order=True)
class Bucket:
    """Padded sizes of a step: T tokens, R rows (R <= T)."""

    num_tokens: int
    num_rows: int


@dataclass(frozen=True)
class BucketTable:
    """Buckets in ascending order of tokens."""

    buckets: tuple[Bucket, ...]
    """All of them."""
    mixed: tuple[Bucket, ...]
    """For steps that hold anything."""
    decode: tuple[Bucket, ...] = ()
    """For steps of one token a row, where these have programs of their own: T = R."""

    @classmethod
    def build(
        cls,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        *,
        decode_programs: bool = False,
        fewest_rows: int = 1,
        fine: bool = False,
        trimmed: bool = False,
        shared: bool = False,
    ) -> BucketTable:
        """One token, powers of two up to the budget, and the budget itself.

        Args:
            max_num_batched_tokens, max_num_seqs: the largest step.
            decode_programs: steps that only decode have programs of their own, up to ``max_num_seqs``; then the others
                begin at ``SMALLEST_MIXED``, since a prompt's few tokens cost what that many do.
            fine: with them, add the sizes of ``FINE_DECODE`` and, for prompts, those half-way from ``FINE_MIXED`` on.
            trimmed: the scheduler cuts steps that are little larger than a size (``RunnerInfo.step_sizes``).
            shared: of ``FINE_DECODE`` only the sizes that steps with prompts have as well.
            fewest_rows: no bucket has fewer tokens (padding makes up for it), as a product with one row is another
                algorithm, which adds up in another order; nor fewer rows, with decode programs. From 2 on the smallest
                has ``SMALLEST_BATCH``, if the budget lets it.
        """
        if not decode_programs:
            sizes = _ladder(max_num_batched_tokens, fewest_rows)
            every = tuple(Bucket(size, min(size, max_num_seqs)) for size in sizes)
            return cls(every, every)
        sizes = _ladder(max_num_batched_tokens)
        sizes = [size for size in sizes if size >= SMALLEST_MIXED] or sizes[-1:]
        if fine:
            most = TRIMMED if trimmed else max_num_batched_tokens
            sizes = _with(sizes, (size * 3 // 2 for size in sizes if FINE_MIXED <= size < most))
        most = max(min(max_num_seqs, max_num_batched_tokens), fewest_rows)
        mixed = tuple(Bucket(size, min(size, most)) for size in (max(size, fewest_rows) for size in sizes))
        rows = _ladder(most, fewest_rows)
        further = (size for size in FINE_DECODE if fine and not (shared and size not in sizes))
        decode = tuple(Bucket(size, size) for size in _with(rows, further))
        return cls(tuple(sorted({*mixed, *decode})), mixed, decode)

    @property
    def costly_sizes(self) -> tuple[int, ...]:
        """Tokens of the steps with prompts whose padding costs what tokens do; none where all steps are of one kind."""
        return tuple(
            bucket.num_tokens for bucket in self.mixed if self.decode and bucket.num_tokens >= FINE_MIXED
        )

    def smallest(self, num_tokens: int, num_rows: int, *, decode_only: bool = False) -> Bucket:
        """The smallest bucket that holds the batch.

        Args:
            num_tokens, num_rows: the batch's live sizes.
            decode_only: every row has one token.

        Raises:
            ValueError: none does; the scheduler broke its budget.
        """
        buckets = self.decode if decode_only and self.decode else self.mixed
        index = bisect.bisect_left(buckets, num_tokens, key=lambda bucket: bucket.num_tokens)
        while index < len(buckets) and buckets[index].num_rows < num_rows:
            index += 1
        if index == len(buckets):
            raise ValueError(f"No bucket holds {num_tokens} tokens in {num_rows} rows.")
        return buckets[index]


def _ladder(most: int, smallest: int = 1) -> list[int]:
    sizes = [1] if most > 1 and smallest == 1 else []
    size = SMALLEST_BATCH
    while size < most:
        sizes.append(size)
        size *= 2
    return [*sizes, most]


def _with(sizes: list[int], further: Iterable[int]) -> list[int]:
    """A ladder with those further rungs that are below its top."""
    return sorted({*sizes, *(size for size in further if size < sizes[-1])})
