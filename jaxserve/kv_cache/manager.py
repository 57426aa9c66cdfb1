"""KVCacheManager: the blocks of every request, and the prefixes that requests share.

A request's state lives on the Request (``block_ids``, ``num_slots``, ``block_hashes``, ``next_cache_at``), so
that asking whether it needs a block is one comparison. Only blocks that are full, whose tokens the host knows
and whose keys and values a dispatched step writes are made findable: device steps run in order, so whoever
finds such a block reads it after it was written.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from jaxserve.errors import ConfigError
from jaxserve.kv_cache.block_hash import extend_block_hashes
from jaxserve.kv_cache.block_pool import DUMMY_BLOCK, BlockPool
from jaxserve.kv_cache.group_managers import make_group_manager
from jaxserve.kv_cache_spec import KVCacheGroup
from jaxserve.request import Request

NEVER = sys.maxsize
"""``next_cache_at`` of a request whose blocks are not to be cached."""


class PrefixHit(NamedTuple):
    """A cached prefix: one block table per group, and the tokens it covers (whole blocks)."""

    block_ids: list[list[int]]
    num_tokens: int


@dataclass(slots=True)
class PrefixCacheStats:
    """Counters in tokens, over requests scheduled for the first time that may read the cache."""

    queries: int = 0
    hits: int = 0


class KVCacheManager:
    """One block pool shared by all groups, one block table per request and group.

    Args:
        groups: layers that share a block table.
        num_blocks: blocks in the pool, the dummy included.
        block_size: tokens in a block.
        enable_prefix_caching: whether full blocks can be found by later requests.
        max_step_tokens: tokens that one step adds to a request at most.
        name: what messages call it.
        separate_paths: what was generated is found again only as such (``extend_block_hashes``).
    """

    def __init__(
        self,
        groups: Sequence[KVCacheGroup],
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        max_step_tokens: int,
        name: str = "the KV cache",
        separate_paths: bool = False,
    ) -> None:
        if num_blocks <= len(groups):
            raise ConfigError(
                f"The KV cache has {num_blocks} blocks, one of them a dummy: too few for {len(groups)} "
                "groups of layers. Give it more memory.",
                param="kv_cache_memory_bytes",
            )
        self.name = name
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.max_step_tokens = max_step_tokens
        self.separate_paths = separate_paths
        self.prefix_cache_stats = PrefixCacheStats()
        self._managers = [
            make_group_manager(group, self.pool, i, block_size) for i, group in enumerate(groups)
        ]
        self.no_hit = PrefixHit([[] for _ in groups], 0)
        """Where a request starts that does not read the prefix cache."""

    @property
    def usage(self) -> float:
        """Share of the blocks in use, 0 to 1."""
        return self.pool.usage

    def describe(self) -> str:
        """Its size, for messages."""
        return f"{self.name} ({self.pool.num_blocks - 1} blocks of {self.block_size} tokens)"

    # --- what fits ------------------------------------------------------------------------------------------

    def fits_alone(self, num_tokens: int) -> bool:
        """Whether a request of ``num_tokens`` could be held if no other ran, however small its steps."""
        return self._num_blocks_held(num_tokens, 1) < self.pool.num_blocks

    def has_block_for_each(self, num_requests: int) -> bool:
        """Whether so many running requests could each have another block, of every group, with nobody preempted."""
        return num_requests * len(self._managers) <= self.pool.num_free

    def num_allocatable_tokens(self, request: Request, hit: PrefixHit | None = None) -> int:
        """Tokens that could be added to the request now: the room in its last block, and all free blocks.

        Args:
            request: running, or waiting and about to start from ``hit``.
        """
        if hit is None:
            room, num_free = request.num_slots - request.num_computed_tokens, self.pool.num_free
        else:
            room, num_free = 0, self.pool.num_free - self._num_free_blocks_of(hit)
        return room + num_free // len(self._managers) * self.block_size

    def _num_blocks_held(self, num_tokens: int, max_step_tokens: int) -> int:
        return sum(manager.num_blocks_held(num_tokens, max_step_tokens) for manager in self._managers)

    def _num_free_blocks_of(self, hit: PrefixHit) -> int:
        ref_counts = self.pool.ref_counts
        return sum(b != DUMMY_BLOCK and ref_counts[b] == 0 for table in hit.block_ids for b in table)

    # --- the prefix cache -----------------------------------------------------------------------------------

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """The longest cached prefix on which all groups agree; nothing is reserved.

        It never covers the last token: that one is recomputed, for its logits.
        """
        if not self.enable_prefix_caching:
            return self.no_hit
        hashes = extend_block_hashes(request, self.block_size, separate_paths=self.separate_paths)
        num_blocks = (request.num_tokens - 1) // self.block_size
        while True:
            tables = [manager.find_hit(hashes, num_blocks) for manager in self._managers]
            agreed = min(map(len, tables))
            if agreed == max(map(len, tables)):
                return PrefixHit(tables, agreed * self.block_size)
            num_blocks = agreed

    def cache_blocks(self, request: Request) -> None:
        """Make the request's blocks findable that are full, known to the host and written by a dispatched
        step."""
        block_size = self.block_size
        num_full = min(len(request.all_token_ids), request.num_computed_tokens) // block_size
        first = request.next_cache_at // block_size - 1
        if num_full <= first:
            return
        hashes = extend_block_hashes(request, block_size, separate_paths=self.separate_paths)
        for manager, table in zip(self._managers, request.block_ids):
            for index in range(first, num_full):
                if table[index] != DUMMY_BLOCK:
                    self.pool.cache(table[index], manager.key(hashes[index]))
        request.next_cache_at = (num_full + 1) * block_size

    def uncache_blocks(self, request: Request) -> None:
        """Forget the content of the request's blocks, which a failed step may have left unwritten."""
        for table in request.block_ids:
            for block in table:
                self.pool.uncache(block)
        request.next_cache_at = NEVER

    def reset_prefix_cache(self, running: Iterable[Request]) -> None:
        """Forget all cached content. ``running`` requests keep their blocks, but these are never shared any
        more."""
        self.pool.reset_cache()
        for request in running:
            request.next_cache_at = NEVER

    # --- blocks of a request --------------------------------------------------------------------------------

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        hit: PrefixHit | None = None,
        *,
        num_reserved_blocks: int = 0,
    ) -> list[list[int]] | None:
        """Give the request slots for its next ``num_new_tokens`` after ``num_computed_tokens``.

        Args:
            request: running (``hit`` is None), or about to start from ``hit``. num_new_tokens: tokens that
                the step will compute. hit: the cached prefix it starts from; the request's tables must be
                empty. num_reserved_blocks: blocks that must be free beside those that the whole request
                needs, so that the running ones can grow.

        Returns:
            The new blocks of each group (of a starting request: its whole tables), or None if too few are
            free; then nothing was taken.
        """
        if hit is not None:
            return self._start(request, num_new_tokens, hit, num_reserved_blocks)
        for manager, table in zip(self._managers, request.block_ids):
            manager.free_unseen(table, request.num_computed_tokens)
        num_tokens = request.num_computed_tokens + num_new_tokens
        count = -(-(num_tokens - request.num_slots) // self.block_size)
        if count <= 0:
            return [[] for _ in self._managers]
        if count * len(self._managers) > self.pool.num_free:
            return None
        return self._extend(request, count)

    def free(self, request: Request) -> None:
        """Take the request's blocks back, so that the end of the sequence is evicted before its beginning."""
        for table in request.block_ids:
            self.pool.free(reversed(table))
        request.block_ids = []
        request.num_slots = 0
        request.next_cache_at = NEVER

    def _start(
        self, request: Request, num_new_tokens: int, hit: PrefixHit, num_reserved_blocks: int
    ) -> list[list[int]] | None:
        num_free = self.pool.num_free - self._num_free_blocks_of(hit)
        count = -(-num_new_tokens // self.block_size)
        needed = count * len(self._managers)
        if num_reserved_blocks:
            in_hit = sum(b != DUMMY_BLOCK for table in hit.block_ids for b in table)
            whole = self._num_blocks_held(request.num_tokens, self.max_step_tokens) - in_hit
            needed = max(needed, whole) + num_reserved_blocks
        if needed > num_free:
            return None
        for table in hit.block_ids:
            self.pool.touch(table)
        request.block_ids = [list(table) for table in hit.block_ids]
        request.num_computed_tokens = hit.num_tokens
        request.num_slots = hit.num_tokens
        request.next_cache_at = hit.num_tokens + self.block_size if self.enable_prefix_caching else NEVER
        self._extend(request, count)
        return [list(table) for table in request.block_ids]

    def _extend(self, request: Request, count: int) -> list[list[int]]:
        new_block_ids: list[list[int]] = []
        for table in request.block_ids:
            new = self.pool.allocate(count)
            table.extend(new)
            new_block_ids.append(new)
        request.num_slots += count * self.block_size
        return new_block_ids
