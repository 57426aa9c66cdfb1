"""Lifecycle: which state each request is in, and what every change of state must do.

WAITING -> RUNNING -> FINISHED, with RUNNING -> PREEMPTED -> RUNNING in between, and FINISHED from everywhere. A
request with a grammar is WAITING_FOR_GRAMMAR first: it is in no queue then, so nobody waits behind it.
A request holds blocks, and has a row in the runner's batch, exactly while it is RUNNING; whoever leaves that
state is named to the runner in the next step.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from jaxserve.errors import InvalidRequestError
from jaxserve.kv_cache.manager import PrefixHit
from jaxserve.request import Request, RequestStatus
from jaxserve.scheduler.queues import make_queue
from jaxserve.scheduler.ranks import Rank
from jaxserve.step import EngineCoreOutput, FinishReason, TokenLogprobs


class Lifecycle:
    """All live requests.

    Args:
        ranks: where running requests are, and have their blocks.
        policy: ``fcfs`` or ``priority``.
    """

    def __init__(self, ranks: Sequence[Rank], policy: str) -> None:
        self.ranks = ranks
        self.by_priority = policy == "priority"
        self.requests: dict[str, Request] = {}
        self.waiting = make_queue(policy)
        self.pending: dict[str, Request] = {}
        """Requests whose grammars are being compiled, by id."""
        self.num_preemptions = 0
        self.num_constrained = 0
        """Live requests with a grammar."""
        self._num_added = 0
        self._finished_ids: list[str] = []
        self._preempted_ids: list[str] = []
        self._must_drop = False

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            InvalidRequestError: its id is in use.
        """
        if request.request_id in self.requests:
            raise InvalidRequestError(
                f"The request id {request.request_id!r} is in use by a request that has not ended.",
                param="request_id",
            )
        self._num_added += 1
        if self.by_priority:
            request.order = (request.priority, request.arrival_time, self._num_added)
        else:
            request.order = (0, 0.0, self._num_added)
        self.requests[request.request_id] = request
        self.num_constrained += request.grammar is not None
        if request.status is RequestStatus.WAITING_FOR_GRAMMAR:
            self.pending[request.request_id] = request
        else:
            self.waiting.add(request)

    @property
    def num_waiting(self) -> int:
        """Requests that do not run."""
        return len(self.waiting) + len(self.pending)

    def admit_compiled(self) -> list[EngineCoreOutput]:
        """Queue the requests whose grammars are compiled, in their places; those whose grammars are wrong fail."""
        refused: list[EngineCoreOutput] = []
        for request in list(self.pending.values()):
            grammar = request.grammar
            if grammar is None or not grammar.ready:
                continue
            try:
                grammar.start()
            except InvalidRequestError as error:
                refused.append(self.refuse(request, error))
                continue
            del self.pending[request.request_id]
            request.status = RequestStatus.WAITING
            self.waiting.insert(request)
        return refused

    def start(self, rank: Rank, hit: PrefixHit | None, now: float) -> None:
        """Move the first waiting request, which has its blocks, to ``rank.running``; ``hit`` if it may read
        the cache."""
        request = self.waiting.pop()
        request.status = RequestStatus.RUNNING
        request.data_rank = rank.index
        insort(rank.running, request, key=_order)
        if request.first_scheduled_time is not None:
            return
        request.first_scheduled_time = now
        if hit is not None:
            request.num_cached_tokens = hit.num_tokens
            rank.kv_cache.prefix_cache_stats.queries += request.num_tokens
            rank.kv_cache.prefix_cache_stats.hits += hit.num_tokens

    def preempt_last(self, rank: Rank) -> Request:
        """Take the blocks of the rank's last running request; it starts again later, on any rank. Its tokens in
        flight still count."""
        request = rank.running.pop()
        rank.kv_cache.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.num_preemptions += 1
        self._preempted_ids.append(request.request_id)
        self.waiting.put_back(request)
        return request

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in any state. ``drop_finished`` must follow before ``running`` is used again."""
        was_running = request.status is RequestStatus.RUNNING
        was_pending = request.status is RequestStatus.WAITING_FOR_GRAMMAR
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self.requests[request.request_id]
        self.num_constrained -= request.grammar is not None
        if was_running:
            self.ranks[request.data_rank].kv_cache.free(request)
            self._finished_ids.append(request.request_id)
            self._must_drop = True
        elif was_pending:
            del self.pending[request.request_id]
        else:
            self.waiting.discard()

    def fail(self, request: Request, reason: str) -> EngineCoreOutput:
        """``finish`` with an error, and say so."""
        self.finish(request, FinishReason.ERROR)
        output = make_output(request)
        output.error = reason
        return output

    def refuse(self, request: Request, error: InvalidRequestError) -> EngineCoreOutput:
        """``fail`` by the request's own mistake."""
        output = self.fail(request, error.message)
        output.invalid_param = error.param or ""
        return output

    def drop_finished(self) -> None:
        """Take the finished requests out of ``running``, all at once."""
        if self._must_drop:
            for rank in self.ranks:
                rank.running[:] = [request for request in rank.running if not request.finished]
            self._must_drop = False

    def take_departed(self) -> tuple[list[str], list[str]]:
        """Ids of the requests that finished, and that were preempted, since the last call: rows that end."""
        departed = self._finished_ids, self._preempted_ids
        self._finished_ids, self._preempted_ids = [], []
        return departed


def make_output(request: Request, prompt_logprobs: list[TokenLogprobs] | None = None) -> EngineCoreOutput:
    """An output without a token."""
    return EngineCoreOutput(
        request.request_id,
        [],
        prompt_logprobs=prompt_logprobs,
        finish_reason=request.finish_reason,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        first_scheduled_time=request.first_scheduled_time,
    )


def _order(request: Request) -> tuple[int, float, int]:
    return request.order
