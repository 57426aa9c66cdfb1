"""Ranks: the data parallel parts of one engine, and on which of them a waiting request starts.

A rank has its own blocks, rows and tokens of a step; the step is one program over all ranks, as long as its
fullest rank. A request stays on the rank it started on until it ends or is preempted: its blocks are there.

The rule: a request starts where the least is to be done. What a rank has to do is the tokens that its requests
hold in blocks, plus ``COMPUTE_WEIGHT`` times those that have yet to be computed there, the newcomer's own
included. So a cached prefix draws a request until its rank is heavier by that many times the prefix; prompts
spread over the ranks, as no rank gets a second while another computes nothing; and the choices of one prompt
follow the first one, which is computing their blocks. Equal ranks take turns, so that an idle engine uses all
its caches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.kv_cache.manager import KVCacheManager, PrefixHit
from jaxserve.request import Request

COMPUTE_WEIGHT = 4
"""Held tokens that weigh as much as one to compute. For an 8B model on an H200, computing a token takes as long as
reading the keys and values of one some hundred times, and as many steps go by before ranks even out again."""


class Rank:
    """One data parallel rank.

    Args:
        index: its number, from 0.
        kv_cache: its blocks.
    """

    __slots__ = ("index", "kv_cache", "running")

    def __init__(self, index: int, kv_cache: KVCacheManager) -> None:
        self.index = index
        self.kv_cache = kv_cache
        self.running: list[Request] = []
        """Sorted by ``Request.order``: the last one is the first to be preempted."""


class Vacancy:
    """What a rank can still take in the step being planned, and what its rows of that step compute.

    Args:
        rank: it preempted nobody in this step.
        num_tokens: tokens of its rows so far.
        budget: tokens that are left.
    """

    __slots__ = ("_filled", "backlog", "budget", "num_tokens", "rank")

    def __init__(self, rank: Rank, num_tokens: int, budget: int) -> None:
        self.rank = rank
        self.num_tokens = num_tokens
        self.budget = budget
        self.backlog = 0
        """Tokens that later steps must compute for the rows of this one."""
        self._filled: dict[bytes, Request] = {}
        """Hashes of the blocks that this step fills, and by whom."""

    def note(self, request: Request, num_tokens: int) -> None:
        """Take in what a row of ``num_tokens``, already added, does in this step and leaves to be done."""
        end, block_size = request.num_computed_tokens, self.rank.kv_cache.block_size
        hashes = request.block_hashes[(end - num_tokens) // block_size : end // block_size]
        self._filled.update(dict.fromkeys(hashes, request))
        self.backlog += request.num_tokens - end

    def enter(self, request: Request, num_tokens: int) -> None:
        """``note`` a request that starts here, and take its tokens off the budget."""
        self.note(request, num_tokens)
        self.num_tokens += num_tokens
        self.budget -= num_tokens

    def who_fills_next(self, request: Request, hit: PrefixHit | None) -> Request | None:
        """Who fills the block behind ``hit`` in this very step; None if nobody does, or nobody needs it."""
        if hit is None:
            return None
        end, block_size = hit.num_tokens + self.rank.kv_cache.block_size, self.rank.kv_cache.block_size
        if end >= request.num_tokens:
            return None  # the last token is computed in any case
        return self._filled.get(request.block_hashes[end // block_size - 1])


class StartOption(NamedTuple):
    """One rank on which a request could start: from ``hit``, or later if somebody (``filler``) is computing more
    of its prefix."""

    vacancy: Vacancy
    hit: PrefixHit | None
    filler: Request | None


def sort_options(request: Request, options: list[StartOption], first: int, num_ranks: int) -> None:
    """Put the options in the order in which to try them; among equals, ranks from ``first`` on."""
    options.sort(key=lambda option: (_load(request, option), (option.vacancy.rank.index - first) % num_ranks))


def _load(request: Request, option: StartOption) -> int:
    """What the rank has to do if the request starts there, in held tokens."""
    vacancy, kv_cache = option.vacancy, option.vacancy.rank.kv_cache
    held = (kv_cache.pool.num_blocks - 1 - kv_cache.pool.num_free) * kv_cache.block_size
    if option.filler is None:
        num_cached = option.hit.num_tokens if option.hit else 0
        to_compute = vacancy.num_tokens
    else:  # as it will be after this step
        num_cached = kv_cache.block_size * _num_common_blocks(
            request.block_hashes, option.filler.block_hashes
        )
        to_compute = 0
    to_compute += vacancy.backlog + request.num_tokens - num_cached
    return held + COMPUTE_WEIGHT * to_compute


def _num_common_blocks(hashes: Sequence[bytes], others: Sequence[bytes]) -> int:
    """Length of the common beginning. Hashes are chained: where two are equal, so is all before them."""
    return bisect_left(
        range(min(len(hashes), len(others))), True, key=lambda index: hashes[index] != others[index]
    )
