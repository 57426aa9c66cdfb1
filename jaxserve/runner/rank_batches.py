"""RankBatches: which request is in which row of which data parallel rank.

Each rank has an ``InputBatch``, the host's side of its rows. All ranks share a step's bucket and program.
"""

from __future__ import annotations

from jaxserve.runner.batch_builder import BatchBuilder, StepBatch, split_by_rank
from jaxserve.runner.input_batch import InputBatch, RowState
from jaxserve.sampling.metadata import Feature
from jaxserve.step import NewRequestData, SchedulerOutput

LOGPROBS = int(Feature.LOGPROBS)


class RankBatches:
    """The rows of all ranks.

    Args:
        num_ranks: of an engine.
        max_num_seqs: rows of each.
        vocab_size: V.

    Attributes:
        batches: of each rank.
    """

    def __init__(self, num_ranks: int, max_num_seqs: int, vocab_size: int) -> None:
        self._sizes = num_ranks, max_num_seqs, vocab_size
        self.clear()

    def clear(self) -> None:
        """Forget all requests."""
        num_ranks, max_num_seqs, vocab_size = self._sizes
        self.batches = [InputBatch(max_num_seqs, vocab_size) for _ in range(num_ranks)]
        self._rank_of: dict[str, int] = {}

    def rank_of(self, request_id: str) -> int:
        """The rank that holds a request; 0 if none does."""
        return self._rank_of.get(request_id, 0)

    def of(self, request_id: str) -> InputBatch:
        """The rows that hold a request; rank 0's if none does."""
        return self.batches[self.rank_of(request_id)]

    def add(self, request: NewRequestData) -> RowState:
        """Give a request a row of its rank."""
        self._rank_of[request.request_id] = request.data_rank
        return self.batches[request.data_rank].add(request)

    def remove(self, request_id: str) -> None:
        """Free a request's row; unknown ids (never scheduled) are ignored."""
        self.of(request_id).remove(request_id)
        self._rank_of.pop(request_id, None)

    @property
    def any_masked(self) -> bool:
        """Some request has a token mask."""
        return any(batch.masked for batch in self.batches)

    def scores_prompts(self, step: SchedulerOutput) -> bool:
        """Some request of the step has a prompt that is not wholly scored."""
        scheduled = step.num_scheduled_tokens
        return any(
            batch.scoring_prompt and not batch.scoring_prompt.isdisjoint(scheduled) for batch in self.batches
        )

    def build(self, builder: BatchBuilder, step: SchedulerOutput, *, decode_only: bool) -> list[StepBatch]:
        """Each rank's part of a step, all of one bucket.

        Args:
            builder: packs a rank's.
            step: of all ranks.
            decode_only: every row has one token, and none scores its prompt.
        """
        if len(self.batches) == 1:
            return [builder.build(self.batches[0], step, decode_only=decode_only)]
        parts = split_by_rank(step, self._rank_of, len(self.batches))
        bucket = builder.bucket_for(parts, decode_only=decode_only)
        return [
            builder.build(batch, part, decode_only=decode_only, bucket=bucket)
            for batch, part in zip(self.batches, parts, strict=True)
        ]

    def num_logprobs(self, steps: list[StepBatch]) -> dict[str, int]:
        """Of each request in the step how many log probabilities it wants; those that want none are left out."""
        wanted: dict[str, int] = {}
        for batch, step in zip(self.batches, steps, strict=True):
            if step.features & LOGPROBS:
                params = ((i, batch.states[i].request.sampling_params) for i in step.request_ids)
                wanted |= {i: p.logprobs for i, p in params if p.logprobs is not None}
        return wanted

    def read_tokens(self, sampled: dict[str, list[int]]) -> None:
        """Keep what requests with a token mask sampled: their next mask may depend on it."""
        for batch in self.batches:
            for request_id, state in batch.masked.items():
                state.output_token_ids += sampled.get(request_id, ())


def sampling_rows(steps: list[StepBatch], step: SchedulerOutput, rows_per_rank: int) -> list[tuple[int, str]]:
    """(row of the step's output, request id) of every request that samples.

    Args:
        steps: each rank's part.
        step: of all ranks.
        rows_per_rank: of the output.
    """
    samples, replayed = step.samples, step.replayed_request_ids
    by_rank = step.num_decode_rows_by_rank or (step.num_decode_rows,)
    rows: list[tuple[int, str]] = []
    for rank, part in enumerate(steps):
        first, num_decode = rank * rows_per_rank, by_rank[rank]
        if num_decode == len(part.request_ids) and not replayed:
            rows += enumerate(part.request_ids, first)
            continue
        rows += [
            (first + index, request_id)
            for index, request_id in enumerate(part.request_ids)
            if (index < num_decode and request_id not in replayed) or request_id in samples
        ]
    return rows
