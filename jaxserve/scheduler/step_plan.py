"""StepPlan: the rows of one step, from when they are chosen until their tokens are read."""

from __future__ import annotations

from bisect import bisect_right
from operator import attrgetter, itemgetter

from jaxserve.request import Request
from jaxserve.step import CachedRequestData, EngineCoreOutput, NewRequestData, SchedulerOutput, TokenMask
from jaxserve.structured_output.request_grammar import RequestGrammar

_data_rank = attrgetter("data_rank")
_num_tokens = itemgetter(1)


class StepPlan:
    """Rows of one step. It holds the requests themselves: by the time the step is read, one may have ended
    and its id be in use again."""

    __slots__ = (
        "appended_token_ids", "burst_tokens", "cached_requests", "decode_rows", "failed", "new_requests",
        "num_decode_rows_by_rank", "num_decode_steps", "other_rows", "replayed", "scoring_rows", "separate_paths",
        "step_id",
    )  # fmt: skip

    def __init__(self, step_id: int, separate_paths: bool = False) -> None:
        self.step_id = step_id
        self.separate_paths = separate_paths
        """Decoding rows are those that compute a generated token (``SchedulerOutput``)."""
        self.decode_rows: list[Request] = []
        """Rows of one token (or a burst's) that sample, and ``replayed``."""
        self.num_decode_steps = 1
        """More in a burst, which ``add_burst`` fills."""
        self.burst_tokens: list[int] = []
        """Of each row of a burst its tokens, in descending order."""
        self.replayed: list[Request] = []
        """Of the decoding rows those that do not sample."""
        self.num_decode_rows_by_rank: tuple[int, ...] = ()
        """Set by ``order_rows``."""
        self.other_rows: list[tuple[Request, int, bool]] = []
        """Request, its tokens in this step, whether it samples."""
        self.scoring_rows: list[tuple[Request, int]] = []
        """Requests with prompt_logprobs whose prompt is scored, and the position where the step starts."""
        self.new_requests: list[NewRequestData] = []
        self.cached_requests: list[CachedRequestData] = []
        self.appended_token_ids: dict[str, list[int]] = {}
        self.failed: list[EngineCoreOutput] = []
        """Requests for which the cache turned out to be too small, or whose grammar is wrong."""

    def add(self, request: Request, num_tokens: int, samples: bool) -> None:
        """Add a row and move the request's bookkeeping to where it will be after this step."""
        start = request.num_computed_tokens
        if request.has_appended:
            request.has_appended = False
            self.appended_token_ids[request.request_id] = request.all_token_ids[start:]
        request.num_computed_tokens = start + num_tokens
        if samples:
            request.num_inflight_tokens += 1
        if self.separate_paths and start >= request.num_prompt_tokens:
            self.decode_rows.append(request)
            if not samples:
                self.replayed.append(request)
        elif samples and num_tokens == 1 and not self.separate_paths:
            self.decode_rows.append(request)
        else:
            self.other_rows.append((request, num_tokens, samples))
        if request.sampling_params.prompt_logprobs is not None and start < request.num_prompt_tokens - 1:
            self.scoring_rows.append((request, start))

    def cut(self, index: int, num_tokens: int) -> None:
        """Take so many tokens back from a row of ``other_rows``, which has more than that."""
        request, scheduled, samples = self.other_rows[index]
        if num_tokens:
            request.num_computed_tokens -= num_tokens
            request.num_inflight_tokens -= samples
            self.other_rows[index] = (request, scheduled - num_tokens, False)

    def add_burst(self, rows: list[tuple[Request, int]]) -> None:
        """Make this step a burst of these rows, each with its number of tokens."""
        rows = sorted(rows, key=_num_tokens, reverse=True)
        for request, num_tokens in rows:
            request.num_computed_tokens += num_tokens
            request.num_inflight_tokens += num_tokens
        self.decode_rows = [request for request, _ in rows]
        self.burst_tokens = [num_tokens for _, num_tokens in rows]
        self.num_decode_steps = self.burst_tokens[0]

    def count_tokens(self) -> int:
        """Tokens of the rows added so far."""
        if self.burst_tokens:
            return sum(self.burst_tokens)
        num_others = sum(row[1] for row in self.other_rows) if self.other_rows else 0
        return len(self.decode_rows) + num_others

    def order_rows(self, num_ranks: int) -> None:
        """Put the rows in their final order, once all are added: rank by rank."""
        if num_ranks == 1:
            self.num_decode_rows_by_rank = (len(self.decode_rows),)
            return
        self.decode_rows.sort(key=_data_rank)
        self.other_rows.sort(key=lambda row: row[0].data_rank)
        ends = [bisect_right(self.decode_rows, rank, key=_data_rank) for rank in range(num_ranks)]
        self.num_decode_rows_by_rank = tuple(end - start for start, end in zip([0, *ends], ends))

    def sampling_rows(self) -> list[Request]:
        """The requests that get a token from this step."""
        decoding = self.decode_rows
        if self.replayed:
            replayed = set(self.replayed)
            decoding = [request for request in decoding if request not in replayed]
        if not self.other_rows:
            return decoding
        return decoding + [request for request, _, samples in self.other_rows if samples]

    def all_rows(self) -> list[Request]:
        """The requests of this step, in row order."""
        return self.decode_rows + [row[0] for row in self.other_rows]

    def grammars(self) -> dict[str, RequestGrammar]:
        """Of the rows that sample, those that are constrained."""
        rows = self.sampling_rows()
        return {request.request_id: request.grammar for request in rows if request.grammar is not None}

    def to_output(
        self, finished_ids: list[str], preempted_ids: list[str], token_masks: dict[str, TokenMask]
    ) -> SchedulerOutput:
        """The message for the runner, after ``order_rows``."""
        ids = [request.request_id for request in self.decode_rows]
        num_scheduled = dict(zip(ids, self.burst_tokens)) if self.burst_tokens else dict.fromkeys(ids, 1)
        replayed = {request.request_id for request in self.replayed}
        samples = set(num_scheduled) - replayed
        for request, num_tokens, row_samples in self.other_rows:
            num_scheduled[request.request_id] = num_tokens
            if row_samples:
                samples.add(request.request_id)
        return SchedulerOutput(
            step_id=self.step_id,
            new_requests=self.new_requests,
            cached_requests=self.cached_requests,
            num_scheduled_tokens=num_scheduled,
            samples=samples,
            finished_request_ids=finished_ids,
            preempted_request_ids=preempted_ids,
            num_decode_rows=len(self.decode_rows),
            appended_token_ids=self.appended_token_ids,
            token_masks=token_masks,
            replayed_request_ids=replayed,
            num_decode_rows_by_rank=self.num_decode_rows_by_rank,
            num_decode_steps=self.num_decode_steps,
        )


def new_request_data(request: Request, block_ids: list[list[int]]) -> NewRequestData:
    """What the runner must know of a request that enters its batch."""
    eos_token_ids = sorted(request.eos_token_ids)
    request.has_appended = False  # it brings all its tokens
    return NewRequestData(
        request_id=request.request_id,
        token_ids=list(request.all_token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        sampling_params=request.sampling_params,
        seed=request.seed,
        stop_token_ids=eos_token_ids + sorted(request.stop_token_ids - request.eos_token_ids),
        bad_words_token_ids=request.bad_words_token_ids,
        block_ids=block_ids,
        num_computed_tokens=request.num_computed_tokens,
        data_rank=request.data_rank,
    )
