"""BlockPool: who holds each physical block of the KV cache, which are free, and which can be found by their
content.

Invariant: a block is on the free list exactly when nobody references it. A free block may still carry the key
of the content it holds; it can be found and taken back until the block is handed out again, which is the only
eviction.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxserve.errors import ConfigError

DUMMY_BLOCK = 0
"""Never handed out: block tables hold it where there is nothing to see. It also heads the free list."""


class BlockPool:
    """A fixed set of blocks, addressed by number; every operation takes constant time per block.

    The free list is a circular doubly linked list threaded through two arrays, least recently used first.
    Blocks without a key hold nothing that could be reused, so they return to its head; the others to its
    tail.

    Args:
        num_blocks: blocks in the cache, the dummy block 0 included.

    Raises:
        ConfigError: if no block is left beside the dummy.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"The KV cache has {num_blocks} blocks; at least 2 are needed, as block 0 is a dummy.",
                param="num_gpu_blocks_override",
            )
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.ref_counts: list[int] = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self._next: list[int] = [*range(1, num_blocks), 0]
        self._prev: list[int] = [num_blocks - 1, *range(num_blocks - 1)]

    @property
    def usage(self) -> float:
        """Share of the blocks that are referenced, 0 to 1."""
        return 1.0 - self.num_free / (self.num_blocks - 1)

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks with one reference each, least recently used first; their old content is
        forgotten.

        Raises:
            RuntimeError: if fewer are free; callers ask ``num_free`` first.
        """
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks were asked for, but {self.num_free} are free.")
        next_, keys, ref_counts = self._next, self._keys, self.ref_counts
        blocks: list[int] = []
        block = next_[DUMMY_BLOCK]
        for _ in range(count):
            blocks.append(block)
            ref_counts[block] = 1
            key = keys[block]
            if key is not None:
                del self._by_key[key]
                keys[block] = None
            block = next_[block]
        next_[DUMMY_BLOCK] = block
        self._prev[block] = DUMMY_BLOCK
        self.num_free -= count
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block (dummies are skipped), taking it off the free list if it was
        there."""
        for block in blocks:
            if block == DUMMY_BLOCK:
                continue
            if self.ref_counts[block] == 0:
                self._unlink(block)
                self.num_free -= 1
            self.ref_counts[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each block (dummies are skipped). Give them in the order in which to evict
        them."""
        for block in blocks:
            if block == DUMMY_BLOCK:
                continue
            count = self.ref_counts[block] - 1
            if count < 0:
                raise RuntimeError(f"Block {block} is free already.")
            self.ref_counts[block] = count
            if count == 0:
                self._link(block, at_head=self._keys[block] is None)
                self.num_free += 1

    def find(self, key: bytes) -> int | None:
        """The block whose content has this key."""
        return self._by_key.get(key)

    def cache(self, block: int, key: bytes) -> None:
        """Make a referenced block findable. If another block holds the same content already, that one
        stays."""
        if key not in self._by_key and self._keys[block] is None:
            self._by_key[key] = block
            self._keys[block] = key

    def uncache(self, block: int) -> None:
        """Forget what a block holds, so that nobody finds it."""
        key = self._keys[block]
        if key is not None:
            del self._by_key[key]
            self._keys[block] = None

    def reset_cache(self) -> None:
        """Forget what all blocks hold."""
        for block in self._by_key.values():
            self._keys[block] = None
        self._by_key.clear()

    def free_list(self) -> list[int]:
        """The free blocks in the order in which they will be handed out (walks the list: for tests)."""
        blocks: list[int] = []
        block = self._next[DUMMY_BLOCK]
        while block != DUMMY_BLOCK:
            blocks.append(block)
            block = self._next[block]
        return blocks

    def cached_blocks(self) -> dict[bytes, int]:
        """A copy of what can be found: key to block (for tests)."""
        return dict(self._by_key)

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before

    def _link(self, block: int, *, at_head: bool) -> None:
        if at_head:
            before, after = DUMMY_BLOCK, self._next[DUMMY_BLOCK]
        else:
            before, after = self._prev[DUMMY_BLOCK], DUMMY_BLOCK
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
