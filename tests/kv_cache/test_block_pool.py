"""BlockPool: order of reuse, reference counts, finding by content; and a model-based sweep."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxserve.errors import ConfigError
from jaxserve.kv_cache.block_pool import BlockPool


def test_the_dummy_is_never_handed_out() -> None:
    pool = BlockPool(5)
    assert pool.num_free == 4
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.usage == 1.0
    with pytest.raises(RuntimeError, match="1 blocks were asked for, but 0 are free"):
        pool.allocate(1)


def test_a_pool_needs_a_block_beside_the_dummy() -> None:
    with pytest.raises(ConfigError, match="1 blocks"):
        BlockPool(1)


def test_allocating_nothing_changes_nothing() -> None:
    pool = BlockPool(4)
    assert pool.allocate(0) == []
    assert pool.free_list() == [1, 2, 3]


def test_cached_blocks_are_evicted_in_the_order_in_which_they_were_freed() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    for block in blocks:
        pool.cache(block, bytes([block]))
    pool.free([3, 1])
    pool.free([4, 2])
    assert pool.allocate(2) == [3, 1]
    assert pool.find(b"\x03") is None
    assert pool.find(b"\x01") is None
    assert pool.find(b"\x04") == 4
    assert pool.find(b"\x02") == 2


def test_blocks_without_content_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    pool.cache(1, b"one")
    pool.free([1, 2, 3])
    assert pool.allocate(2) == [3, 2]
    assert pool.find(b"one") == 1


def test_touch_takes_a_block_back_from_the_free_list() -> None:
    pool = BlockPool(4)
    pool.allocate(3)
    pool.cache(2, b"two")
    pool.free([1, 2, 3])
    pool.touch([0, 2])
    assert pool.num_free == 2
    assert pool.ref_counts[2] == 1
    assert sorted(pool.allocate(2)) == [1, 3]
    pool.touch([2])
    pool.free([2])
    assert pool.num_free == 0
    pool.free([2, 0])
    assert pool.free_list() == [2]


def test_freeing_twice_is_an_error() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    pool.free([1])
    with pytest.raises(RuntimeError, match="Block 1 is free already"):
        pool.free([1])
    assert pool.num_free == 2


def test_the_first_block_of_equal_content_is_kept() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool.cache(1, b"same")
    pool.cache(2, b"same")
    assert pool.find(b"same") == 1
    pool.uncache(2)
    assert pool.find(b"same") == 1
    pool.uncache(1)
    assert pool.find(b"same") is None
    pool.cache(2, b"same")
    assert pool.find(b"same") == 2


def test_reset_forgets_content_of_free_and_of_used_blocks() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    pool.cache(1, b"one")
    pool.cache(2, b"two")
    pool.free([2])
    pool.reset_cache()
    assert pool.cached_blocks() == {}
    assert pool.find(b"one") is None
    pool.free([1])
    assert pool.allocate(2) == [1, 2]


class PoolMachine(RuleBasedStateMachine):
    """Against a model that keeps the free blocks in a plain list."""

    @initialize(num_blocks=st.integers(2, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.free_blocks = list(range(1, num_blocks))
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.keys: dict[int, bytes] = {}

    def _used(self) -> list[int]:
        return [block for block, count in self.refs.items() if count]

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count > len(self.free_blocks):
            with pytest.raises(RuntimeError):
                self.pool.allocate(count)
            return
        expected, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
        assert self.pool.allocate(count) == expected
        for block in expected:
            self.refs[block] = 1
            self.keys.pop(block, None)

    @precondition(lambda self: self._used())
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self._used()))
        self.pool.free([block])
        self.refs[block] -= 1
        if self.refs[block] == 0:
            self.free_blocks.insert(len(self.free_blocks) if block in self.keys else 0, block)

    @precondition(lambda self: self._used())
    @rule(data=st.data(), key=st.sampled_from([b"a", b"b", b"c", b"d"]))
    def cache(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(self._used()))
        self.pool.cache(block, key)
        if key not in self.keys.values():
            self.keys.setdefault(block, key)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.keys.values())))
        block = self.pool.find(key)
        assert block is not None
        self.pool.touch([block])
        self.refs[block] += 1
        if block in self.free_blocks:
            self.free_blocks.remove(block)

    @rule()
    def reset(self) -> None:
        self.pool.reset_cache()
        self.keys.clear()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.free_list() == self.free_blocks
            assert self.pool.num_free == len(self.free_blocks)
            assert self.pool.cached_blocks() == {key: block for block, key in self.keys.items()}
            assert self.pool.ref_counts[1:] == list(self.refs.values())


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPoolMachine = PoolMachine.TestCase
