"""BatchBuilder: from the scheduler's rows to one padded buffer for the device, by numpy alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxserve.runner.buckets import Bucket, BucketTable
from jaxserve.runner.input_batch import DecodeStep, InputBatch, TablePatches
from jaxserve.runner.step_layout import FROM_DEVICE, StepLayout
from jaxserve.sampling.metadata import COLUMN, NUM_COLUMNS, make_table, step_features
from jaxserve.step import BurstLimits, SchedulerOutput

NO_PATCHES = TablePatches()
"""Not to be added to."""


class ScheduledRows(Protocol):
    """One rank's rows of a step, decode first; with one rank, the ``SchedulerOutput`` itself."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]: ...

    @property
    def num_decode_rows(self) -> int: ...

    @property
    def samples(self) -> Collection[str]: ...

    @property
    def replayed_request_ids(self) -> Collection[str]: ...

    @property
    def num_decode_steps(self) -> int: ...


@dataclass(frozen=True)
class RankRows:
    """The rows of one of several ranks."""

    num_scheduled_tokens: dict[str, int]
    num_decode_rows: int
    samples: Collection[str]
    replayed_request_ids: Collection[str] = ()
    num_decode_steps: int = 1


def split_by_rank(
    step: SchedulerOutput, rank_of: Mapping[str, int], num_ranks: int
) -> Sequence[ScheduledRows]:
    """A step's rows rank by rank, in the order they have."""
    if num_ranks == 1:
        return [step]
    rows: list[dict[str, int]] = [{} for _ in range(num_ranks)]
    for request_id, num_tokens in step.num_scheduled_tokens.items():
        rows[rank_of[request_id]][request_id] = num_tokens
    decodes = step.num_decode_rows_by_rank or (0,) * num_ranks
    replayed = step.replayed_request_ids
    return [RankRows(part, decodes[rank], step.samples, replayed) for rank, part in enumerate(rows)]


@dataclass(slots=True)
class StepBatch:
    """One step, ready to be sent.

    ``rows`` are the persistent rows in batch order; ``starts`` where each row's tokens begin, one more than rows.
    """

    bucket: Bucket
    buffer: np.ndarray
    request_ids: list[str]
    rows: np.ndarray
    starts: np.ndarray
    features: int
    early_patches: TablePatches
    """Block table entries that do not fit into the step's buffer: to be set before it."""


class BatchBuilder:
    """Builds buffers in the shapes of the bucket table, for one rank at a time.

    Args:
        table: of the steps' shapes.
        block_size: tokens in a block.
        max_num_seqs: S.
        bursts: what is taken of them; None: none are built.
    """

    def __init__(
        self, table: BucketTable, block_size: int, max_num_seqs: int, bursts: BurstLimits | None = None
    ) -> None:
        self.table, self.bursts = table, bursts
        self.max_num_seqs = max_num_seqs
        self.layouts = {bucket: StepLayout(bucket, block_size, max_num_seqs) for bucket in table.buckets}
        self.burst_layouts: dict[Bucket, StepLayout] = {}
        """Of the buckets that bursts may have, in ascending order."""
        if bursts is not None:
            most = min(bursts.max_rows, max_num_seqs)
            largest = table.smallest(most, most, decode_only=True)
            self.burst_layouts = {
                bucket: StepLayout(bucket, block_size, max_num_seqs, bursts.num_steps)
                for bucket in table.decode or table.mixed
                if bucket <= largest
            }

    def padding(self, bucket: Bucket, *, burst: bool = False) -> np.ndarray:
        """A buffer without a single live row: writes nothing, samples nothing. For warm-up."""
        layout = (self.burst_layouts if burst else self.layouts)[bucket]
        buffer = np.zeros(layout.size, np.int32)
        fields = layout.split(buffer)
        fields["row_index"][:] = self.max_num_seqs
        fields["patch_rows"][:] = self.max_num_seqs
        fields["bucket_rows"][0] = bucket.num_rows
        fields["sampling"][:] = make_table(self.max_num_seqs)[-1]
        return buffer

    def bucket_for(self, parts: Sequence[ScheduledRows], *, decode_only: bool) -> Bucket:
        """The smallest bucket that holds every rank's rows: the fullest rank decides for all."""
        buckets = (
            self.table.smallest(
                sum(part.num_scheduled_tokens.values()),
                len(part.num_scheduled_tokens),
                decode_only=decode_only,
            )
            for part in parts
        )
        return max(buckets)

    def build(
        self,
        batch: InputBatch,
        step: ScheduledRows,
        *,
        decode_only: bool | None = None,
        bucket: Bucket | None = None,
    ) -> StepBatch:
        """Pad the scheduled rows; advances ``num_computed_tokens`` of each by what is scheduled, never by a pad.

        Args:
            batch: the persistent rows.
            step: what is scheduled.
            decode_only: whether a program for rows of one token alone (or a burst's) will run it; None: if all are.
            bucket: the step's, where other ranks have a say in it; None: the smallest that holds these rows.
        """
        request_ids = list(step.num_scheduled_tokens)
        num_tokens_of = list(step.num_scheduled_tokens.values())
        num_rows, burst = len(request_ids), step.num_decode_steps > 1
        if decode_only is None:
            decode_only = step.num_decode_rows == num_rows
        decodes = step.num_decode_rows == num_rows and not step.replayed_request_ids
        asked, last = (decode_only, burst, bucket), batch.last_decode
        if (
            decodes
            and last is not None
            and request_ids == last.request_ids
            and num_tokens_of == last.num_tokens_of
            and asked == last.asked
        ):
            return self._build_again(batch, last)
        rows = np.fromiter(map(batch.row_of.__getitem__, request_ids), np.int32, num_rows)
        scheduled = np.array(num_tokens_of, np.int32)
        counts = np.ones_like(scheduled) if burst else scheduled
        starts = np.zeros(num_rows + 1, np.int32)
        np.cumsum(counts, out=starts[1:])
        num_tokens = int(starts[-1])
        if bucket is None:
            bucket = self.table.smallest(num_tokens, num_rows, decode_only=decode_only)
        layout = (self.burst_layouts if burst else self.layouts)[bucket]
        buffer = np.empty(layout.size, np.int32)
        fields = layout.split(buffer)
        computed = batch.num_computed_tokens[rows]
        all_sampled = self._write_tokens(
            fields["token_ids"], batch, step, request_ids, rows, computed, starts
        )
        fields["query_start_loc"][: num_rows + 1] = starts
        fields["query_start_loc"][num_rows + 1 :] = num_tokens
        fields["num_computed_tokens"][:num_rows] = computed
        fields["num_computed_tokens"][num_rows:] = 0
        fields["row_index"][:num_rows] = rows
        fields["row_index"][num_rows:] = self.max_num_seqs
        fields["distribution"][:] = (step.num_decode_rows, step.num_decode_rows, num_rows)
        self._write_sampling(fields["sampling"], batch, step, request_ids, rows, computed + counts)
        features = int(step_features(fields["sampling"]))
        fields["step_features"][0] = features
        fields["bucket_rows"][0] = bucket.num_rows
        if burst:
            fields["live_rows"][:] = (scheduled[:, None] > np.arange(layout.num_steps)).sum(axis=0)
        has_patches = bool(batch.patches.rows)
        early = self._write_patches(fields, layout, batch.patches.take())
        batch.num_computed_tokens[rows] += scheduled
        batch.last_decode = None
        if decodes and all_sampled:
            batch.last_decode = DecodeStep(
                request_ids,
                num_tokens_of,
                asked,
                layout,
                scheduled,
                rows,
                starts,
                bucket,
                buffer,
                features,
                has_patches,
            )
        return StepBatch(bucket, buffer, request_ids, rows, starts, features, early)

    def _build_again(self, batch: InputBatch, last: DecodeStep) -> StepBatch:
        """The step after ``last`` with the same rows: what ``build`` would make of it, but for block tables and
        positions a copy."""
        layout, num_rows = last.layout, len(last.request_ids)
        last.buffer = buffer = last.buffer.copy()
        buffer[layout.slice_of("num_computed_tokens")][:num_rows] += last.scheduled
        positions = buffer[layout.slice_of("sampling")][COLUMN["positions"] :: NUM_COLUMNS]
        positions[:num_rows] += last.scheduled
        early = NO_PATCHES
        if batch.patches.rows or last.has_patches:
            last.has_patches = bool(batch.patches.rows)
            early = self._write_patches(layout.split(buffer), layout, batch.patches.take())
        batch.num_computed_tokens[last.rows] += last.scheduled
        return StepBatch(last.bucket, buffer, last.request_ids, last.rows, last.starts, last.features, early)

    def _write_tokens(
        self, out: np.ndarray, batch: InputBatch, step: ScheduledRows, request_ids: list[str], rows: np.ndarray,
        computed: np.ndarray, starts: np.ndarray,
    ) -> bool:  # fmt: skip
        """Token ids the host knows; ``FROM_DEVICE`` where the row's last sampled token is meant; 0 for padding.

        Returns:
            Whether all of the rows' tokens are such: the host knows no more of these rows.
        """
        num_decode = step.num_decode_rows
        out[:num_decode] = FROM_DEVICE
        out[starts[-1] :] = 0
        known = computed < batch.num_known_tokens[rows]
        known[num_decode:] = True
        indices = np.flatnonzero(known)
        for index in indices:
            state = batch.states[request_ids[index]]
            begin, first, last = computed[index], starts[index], starts[index + 1]
            tokens = state.token_ids[begin : begin + last - first]
            out[first : first + len(tokens)] = tokens
            out[first + len(tokens) : last] = FROM_DEVICE
        return len(indices) == 0

    def _write_sampling(
        self, out: np.ndarray, batch: InputBatch, step: ScheduledRows, request_ids: list[str], rows: np.ndarray,
        positions: np.ndarray,
    ) -> None:  # fmt: skip
        """Parameters of the rows that sample; the padding row for all others."""
        num_rows, num_decode = len(rows), step.num_decode_rows
        sampling_rows = np.full(len(out), self.max_num_seqs, np.int32)
        sampling_rows[:num_decode] = rows[:num_decode]
        if step.replayed_request_ids:
            replayed = [request_id in step.replayed_request_ids for request_id in request_ids[:num_decode]]
            sampling_rows[:num_decode][replayed] = self.max_num_seqs
        samples = step.samples
        for index in range(num_decode, num_rows):
            if request_ids[index] in samples:
                sampling_rows[index] = rows[index]
        np.take(batch.sampling, sampling_rows, axis=0, out=out)
        out[:num_rows, COLUMN["positions"]] = positions

    def _write_patches(
        self, fields: dict[str, np.ndarray], layout: StepLayout, patches: TablePatches
    ) -> TablePatches:
        """The newest entries travel with the step; the overflow is returned."""
        overflow = max(0, len(patches.rows) - layout.num_patches)
        early = TablePatches(patches.rows[:overflow], patches.columns[:overflow], patches.blocks[:overflow])
        num = len(patches.rows) - overflow
        fields["patch_rows"][:num] = patches.rows[overflow:]
        fields["patch_rows"][num:] = self.max_num_seqs  # out of range: dropped
        fields["patch_columns"][:num] = patches.columns[overflow:]
        fields["patch_columns"][num:] = 0
        fields["patch_blocks"][:num] = patches.blocks[overflow:]
        fields["patch_blocks"][num:] = 0
        return early
