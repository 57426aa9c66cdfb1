"""What each kind of layer keeps, frees and finds again."""

from __future__ import annotations

import pytest
from fake_runner import full_attention_group, sliding_window_group

from jaxserve.kv_cache.block_pool import BlockPool
from jaxserve.kv_cache.group_managers import FullAttentionManager, SlidingWindowManager, make_group_manager

HASHES = [bytes([i]) * 4 for i in range(8)]


def cached(manager: FullAttentionManager, indices: str) -> dict[int, int]:
    """Cache the blocks at ``indices`` of a sequence; returns index -> block."""
    blocks: dict[int, int] = {}
    for index in map(int, indices):
        (block,) = manager.pool.allocate(1)
        manager.pool.cache(block, manager.key(HASHES[index]))
        blocks[index] = block
    return blocks


def window_manager(window: int, block_size: int = 4, group_index: int = 0) -> SlidingWindowManager:
    return SlidingWindowManager(BlockPool(20), group_index, block_size, window)


def test_specs_choose_the_manager() -> None:
    pool = BlockPool(4)
    assert type(make_group_manager(full_attention_group(), pool, 0, 4)) is FullAttentionManager
    manager = make_group_manager(sliding_window_group(7), pool, 0, 4)
    assert isinstance(manager, SlidingWindowManager)
    assert manager.window == 7


@pytest.mark.parametrize(
    "indices, limit, length", [("", 8, 0), ("012", 8, 3), ("012", 2, 2), ("0134", 8, 2), ("123", 8, 0)]
)
def test_full_attention_hits_end_at_the_first_gap(indices: str, limit: int, length: int) -> None:
    manager = FullAttentionManager(BlockPool(20), 0, 4)
    blocks = cached(manager, indices)
    assert manager.find_hit(HASHES, limit) == [blocks[i] for i in range(length)]


def test_full_attention_frees_nothing() -> None:
    manager = FullAttentionManager(BlockPool(20), 0, 4)
    table = manager.pool.allocate(3)
    manager.free_unseen(table, 12)
    assert table == [1, 2, 3]
    assert manager.num_blocks_held(9, 1) == 3


def test_groups_do_not_find_each_others_blocks() -> None:
    pool = BlockPool(20)
    first, second = FullAttentionManager(pool, 0, 4), FullAttentionManager(pool, 1, 4)
    blocks = cached(first, "0")
    assert second.find_hit(HASHES, 1) == []
    others = cached(second, "0")
    assert first.find_hit(HASHES, 1) == [blocks[0]]
    assert second.find_hit(HASHES, 1) == [others[0]]


@pytest.mark.parametrize(
    "window, indices, limit, table",
    [
        (5, "2", 3, "..2"),  # the next query sees 4 tokens back: one block
        (6, "2", 3, ""),  # 5 tokens back: two blocks
        (6, "12", 3, ".12"),
        (6, "01", 3, "01"),  # a shorter prefix
        (6, "0", 3, "0"),  # reaches the start
        (6, "12567", 8, "......67"),
        (6, "124567", 5, ".12"),
        (9, "24567", 8, "......67"),
        (10, "24567", 8, ".....567"),
        (1, "", 3, "..."),  # a query sees only itself: nothing must be there
        (2, "", 3, ""),
        (100, "0123", 8, "0123"),
        (100, "1234567", 8, ""),
    ],
)
def test_window_hits_need_only_the_blocks_of_the_window(
    window: int, indices: str, limit: int, table: str
) -> None:
    manager = window_manager(window)
    blocks = cached(manager, indices)
    expected = [0 if character == "." else blocks[int(character)] for character in table]
    assert manager.find_hit(HASHES, limit) == expected


@pytest.mark.parametrize(
    "num_computed, freed", [(0, 0), (8, 0), (9, 0), (10, 0), (11, 1), (14, 1), (15, 2), (40, 4)]
)
def test_blocks_out_of_the_window_are_freed(num_computed: int, freed: int) -> None:
    """With a window of 8, the query at 11 sees positions 4 to 11, so the block of positions 0 to 3 goes."""
    manager = window_manager(8)
    table = manager.pool.allocate(4)
    manager.free_unseen(table, num_computed)
    assert table == [0] * freed + [1, 2, 3, 4][freed:]
    assert manager.pool.num_free == 15 + freed
    manager.free_unseen(table, num_computed)
    assert manager.pool.num_free == 15 + freed


def test_the_oldest_blocks_of_a_window_are_evicted_first() -> None:
    manager = window_manager(4)
    blocks = cached(manager, "0123")
    manager.free_unseen(list(blocks.values()), 16)
    assert manager.pool.free_list()[-3:] == [1, 2, 3]


@pytest.mark.parametrize("window", [1, 2, 4, 5, 6, 9])
@pytest.mark.parametrize("step", [1, 2, 5, 16])
def test_num_blocks_held_is_what_a_long_request_holds(window: int, step: int) -> None:
    manager = window_manager(window)
    most = 0
    for start in range(64):
        visible = range(max(0, start - window + 1), start + step)
        most = max(most, len({position // 4 for position in visible}))
    assert manager.num_blocks_held(1000, step) == most
    assert manager.num_blocks_held(3, step) == 1
