"""When several decode steps go to the device at once, and how each request takes part.

Where a step takes the host longer than the device, the host sets the pace. So it dispatches several decode steps as one
(a burst), while nobody waits for the next step: a newcomer would, and whoever needs the host between two tokens. Rows
that may end at any token take part all the same; what a burst samples beyond their end is dropped, as is otherwise what
the step in flight samples for them. Rows whose last token is known to come sooner leave the burst there.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from jaxserve.request import Request
from jaxserve.scheduler.ranks import Rank
from jaxserve.step import BurstLimits


class Draw(enum.IntFlag):
    """What a request's tokens ask of the sampler, as far as bursts know it."""

    GREEDY = 0
    TOP_K = 1
    """Random, with a top-k within the limit."""
    RANDOM = 2
    """Random, of the whole distribution."""
    OTHER = 4
    """More, or the host has to see every token: never in a burst."""


BURST_DRAWS = (Draw.GREEDY, Draw.TOP_K, Draw.RANDOM)
"""Unions of the draws of a burst's rows."""


class Bursts:
    """Decides on bursts, within what the runner takes.

    Args:
        limits: the runner's.
    """

    def __init__(self, limits: BurstLimits) -> None:
        self.limits = limits

    def draw_of(self, request: Request) -> Draw:
        """How the request takes part."""
        params = request.sampling_params
        seen_by_host = (
            request.needs_sync
            or request.bad_words_token_ids
            or params.logprobs is not None
            or params.prompt_logprobs is not None
            or params.allowed_token_ids is not None
            or params.min_tokens > 0
        )
        if seen_by_host or params.needs_penalties or params.logit_bias:
            return Draw.OTHER
        if params.greedy or params.top_k == 1:
            return Draw.GREEDY
        if 0 < params.top_k <= self.limits.max_top_k:
            return Draw.TOP_K
        return Draw.RANDOM if params.top_k <= 0 and params.top_p >= 1 else Draw.OTHER

    def num_steps(self, rank: Rank) -> int:
        """Decode steps of the next dispatch, if nobody waits: those of a burst, or 1.

        There is a burst if all running requests fit into it, one of them takes part in all of its steps, and every one
        could have another block.
        """
        running, limits = rank.running, self.limits
        if not 0 < len(running) <= limits.max_rows or not rank.kv_cache.has_block_for_each(len(running)):
            return 1
        return limits.num_steps if self._all_fit(running) else 1

    def _all_fit(self, running: Iterable[Request]) -> bool:
        union, most = Draw.GREEDY, 0
        for request in running:
            left = request.max_computed_tokens - request.num_computed_tokens
            if left <= 0:
                continue  # its last token is in flight
            if request.num_tokens_with_inflight - request.num_computed_tokens != 1:
                return False  # it computes its prompt
            union |= request.draw
            most = max(most, left)
        return union in BURST_DRAWS and most >= self.limits.num_steps
