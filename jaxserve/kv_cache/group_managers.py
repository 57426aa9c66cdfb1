"""Group managers: what one group of layers keeps of a sequence, hence which blocks it needs, frees and finds
again.

A block table has one entry per ``block_size`` tokens, whatever the group; where a group keeps nothing, the
entry is the dummy block. All groups' tables of a request are therefore equally long.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.kv_cache.block_pool import DUMMY_BLOCK, BlockPool
from jaxserve.kv_cache_spec import KVCacheGroup


class FullAttentionManager:
    """Layers whose queries see all earlier tokens: every block stays until the request ends.

    Args:
        pool: shared by all groups.
        group_index: sets this group's blocks apart from other groups' blocks of the same tokens.
        block_size: tokens in a block.
    """

    def __init__(self, pool: BlockPool, group_index: int, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self._key_suffix = b"" if group_index == 0 else group_index.to_bytes(2, "little")

    def key(self, block_hash: bytes) -> bytes:
        """The key under which the pool finds this group's block."""
        return block_hash + self._key_suffix

    def find_hit(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """The block table of the longest cached prefix, of at most ``limit`` blocks; no reference is
        taken."""
        find, suffix = self.pool.find, self._key_suffix
        table: list[int] = []
        for index in range(limit):
            block = find(hashes[index] + suffix)
            if block is None:
                break
            table.append(block)
        return table

    def free_unseen(self, table: list[int], num_computed_tokens: int) -> None:
        """Free the blocks that no query at ``num_computed_tokens`` or later sees, leaving the dummy in the
        table."""

    def num_blocks_held(self, num_tokens: int, max_step_tokens: int) -> int:
        """Blocks that a request of ``num_tokens`` holds at most, when a step adds ``max_step_tokens`` at
        most."""
        return -(-num_tokens // self.block_size)


class SlidingWindowManager(FullAttentionManager):
    """Layers whose queries see the last ``window`` tokens, themselves included: older blocks are freed.

    A query at position p sees positions p - window + 1 to p.
    """

    def __init__(self, pool: BlockPool, group_index: int, block_size: int, window: int) -> None:
        super().__init__(pool, group_index, block_size)
        self.window = window

    def find_hit(self, hashes: Sequence[bytes], limit: int) -> list[int]:
        """Only the blocks that the first new query sees need be there; the entries before them are dummies.

        Searched from the right: a run of cached blocks that covers the window, or reaches the start, is a hit
        that ends where the run ends.
        """
        needed = -(-(self.window - 1) // self.block_size)
        find, suffix = self.pool.find, self._key_suffix
        end, run = limit, []
        for index in range(limit - 1, -1, -1):
            if len(run) >= needed:
                break
            block = find(hashes[index] + suffix)
            if block is None:
                end, run = index, []
            else:
                run.append(block)
        return [DUMMY_BLOCK] * (end - len(run)) + run[::-1]

    def free_unseen(self, table: list[int], num_computed_tokens: int) -> None:
        num_unseen = max(0, num_computed_tokens - self.window + 1) // self.block_size
        freed: list[int] = []
        for index in range(min(num_unseen, len(table)) - 1, -1, -1):
            if table[index] == DUMMY_BLOCK:
                break  # everything before it was freed earlier
            freed.append(table[index])
            table[index] = DUMMY_BLOCK
        self.pool.free(reversed(freed))

    def num_blocks_held(self, num_tokens: int, max_step_tokens: int) -> int:
        num_seen = self.window - 1 + max_step_tokens
        in_window = -(-(num_seen - 1) // self.block_size) + 1  # blocks that so many tokens touch at worst
        return min(super().num_blocks_held(num_tokens, max_step_tokens), in_window)


def make_group_manager(
    group: KVCacheGroup, pool: BlockPool, group_index: int, block_size: int
) -> FullAttentionManager:
    """The manager for a group's spec."""
    if group.spec.sliding_window is None:
        return FullAttentionManager(pool, group_index, block_size)
    return SlidingWindowManager(pool, group_index, block_size, group.spec.sliding_window)
