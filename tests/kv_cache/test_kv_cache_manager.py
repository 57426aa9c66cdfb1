"""KVCacheManager: hits, slots, what is cached when, and who is evicted."""

from __future__ import annotations

import pytest
from fake_runner import full_attention_group, sliding_window_group
from scheduler_harness import make_request

from jaxserve.errors import ConfigError
from jaxserve.kv_cache.manager import NEVER, KVCacheManager
from jaxserve.kv_cache_spec import KVCacheGroup
from jaxserve.request import Request

FULL, WINDOW = full_attention_group(), sliding_window_group(6)


def make_manager(
    groups: tuple[KVCacheGroup, ...] = (FULL,), num_blocks: int = 20, caching: bool = True, step: int = 64
) -> KVCacheManager:
    return KVCacheManager(groups, num_blocks + 1, 4, enable_prefix_caching=caching, max_step_tokens=step)


def compute(manager: KVCacheManager, request: Request, num_tokens: int | None = None) -> list[list[int]]:
    """Start a request, compute tokens (by default all) in one step and cache what is full."""
    hit = manager.get_computed_blocks(request)
    count = request.num_tokens - hit.num_tokens if num_tokens is None else num_tokens
    block_ids = manager.allocate_slots(request, count, hit)
    assert block_ids is not None
    request.num_computed_tokens += count
    manager.cache_blocks(request)
    return block_ids


def test_the_pool_must_have_a_block_for_each_group() -> None:
    make_manager((FULL, WINDOW), num_blocks=2)
    with pytest.raises(ConfigError, match="2 groups"):
        make_manager((FULL, WINDOW), num_blocks=1)


def test_a_hit_covers_whole_blocks_and_never_the_last_token() -> None:
    manager = make_manager()
    first = compute(manager, make_request("a", list(range(12))))
    for length, covered in [(12, 8), (13, 12), (11, 8), (9, 8), (8, 4), (5, 4), (4, 0)]:
        hit = manager.get_computed_blocks(make_request("b", list(range(length))))
        assert hit.num_tokens == covered, length
        assert hit.block_ids == [first[0][: covered // 4]]


def test_only_equal_prefixes_hit() -> None:
    manager = make_manager()
    compute(manager, make_request("a", list(range(12)), cache_salt="x"))

    def hit(tokens: list[int], salt: str | None) -> int:
        return manager.get_computed_blocks(make_request("b", tokens, cache_salt=salt)).num_tokens

    assert hit([*range(12), 0], "x") == 12
    assert hit([*range(12), 0], None) == 0
    assert hit([*range(12), 0], "y") == 0
    assert hit([0, 1, 2, 3, 9, 5, 6, 7, 8, 9], "x") == 4
    assert hit([4, 5, 6, 7, 8], "x") == 0


def test_shared_blocks_come_back_when_the_last_owner_ends() -> None:
    manager = make_manager(num_blocks=5)
    a, b = make_request("a", [1] * 9), make_request("b", [1] * 9)
    compute(manager, a)
    compute(manager, b)
    assert a.block_ids[0][:2] == b.block_ids[0][:2]
    assert manager.pool.num_free == 1
    manager.free(a)
    assert manager.pool.num_free == 2
    manager.free(b)
    assert manager.pool.num_free == 5
    assert (a.block_ids, a.num_slots, a.next_cache_at) == ([], 0, NEVER)


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    manager = make_manager(num_blocks=4)
    a = make_request("a", list(range(16)))
    compute(manager, a)
    manager.free(a)
    compute(manager, make_request("b", [99] * 8))
    assert manager.get_computed_blocks(make_request("c", [*range(16), 0])).num_tokens == 8


def test_a_hit_on_a_free_block_uses_that_block_up() -> None:
    """Two of three free blocks are hit, so one is left, and two are needed."""
    manager = make_manager(num_blocks=3)
    a = make_request("a", [1] * 8)
    compute(manager, a)
    manager.free(a)
    b = make_request("b", [1] * 8 + [2] * 5)
    hit = manager.get_computed_blocks(b)
    assert hit.num_tokens == 8
    assert manager.num_allocatable_tokens(b, hit) == 4
    assert manager.allocate_slots(b, 5, hit) is None
    assert manager.pool.num_free == 3
    assert b.block_ids == []
    assert manager.allocate_slots(b, 4, hit) is not None
    assert manager.pool.num_free == 0
    assert manager.num_allocatable_tokens(b) == 4


def test_running_requests_get_blocks_only_when_slots_run_out() -> None:
    manager = make_manager(num_blocks=3)
    request = make_request("a", [1] * 6)
    assert compute(manager, request) == [[1, 2]]
    assert manager.allocate_slots(request, 2) == [[]]
    assert manager.allocate_slots(request, 3) == [[3]]
    assert request.block_ids == [[1, 2, 3]]
    assert request.num_slots == 12
    assert manager.allocate_slots(request, 7) is None


def test_blocks_are_kept_in_reserve_for_running_requests() -> None:
    manager = make_manager(num_blocks=6)
    request = make_request("a", [1] * 16)
    hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, 4, hit, num_reserved_blocks=3) is None  # 4 for all of it, 3 beside
    assert manager.allocate_slots(request, 4, hit, num_reserved_blocks=2) == [[1]]


def test_tokens_that_are_not_read_or_not_computed_are_not_cached() -> None:
    manager = make_manager()
    request = make_request("a", [1] * 7)
    compute(manager, request)
    assert len(manager.pool.cached_blocks()) == 1
    request.num_inflight_tokens, request.num_computed_tokens = 1, 8  # a step computes token 7, not read yet
    manager.cache_blocks(request)
    assert len(manager.pool.cached_blocks()) == 1
    request.all_token_ids.append(5)
    manager.cache_blocks(request)
    assert len(manager.pool.cached_blocks()) == 2
    request.all_token_ids += [5] * 4  # known, but computed only in part
    manager.allocate_slots(request, 4)
    request.num_computed_tokens = 11
    manager.cache_blocks(request)
    assert len(manager.pool.cached_blocks()) == 2
    assert request.next_cache_at == 12


def test_without_caching_nothing_is_hashed_or_found() -> None:
    manager = make_manager(caching=False)
    a = make_request("a", [1] * 9)
    compute(manager, a)
    assert a.next_cache_at == NEVER
    assert a.block_hashes == []
    assert len(manager.pool.cached_blocks()) == 0
    assert manager.get_computed_blocks(make_request("b", [1] * 9)) == manager.no_hit


def test_reset_forgets_prefixes_also_of_running_requests() -> None:
    manager = make_manager()
    a, b = make_request("a", list(range(20))), make_request("b", list(range(20)))
    compute(manager, a, num_tokens=10)
    manager.reset_prefix_cache([a])
    assert manager.get_computed_blocks(b).num_tokens == 0
    assert manager.allocate_slots(a, 10) is not None
    a.num_computed_tokens = 20
    manager.cache_blocks(a)
    assert len(manager.pool.cached_blocks()) == 0
    compute(manager, b)
    assert len(manager.pool.cached_blocks()) == 5


def test_uncached_blocks_are_not_found() -> None:
    manager = make_manager()
    a = make_request("a", [1] * 9)
    compute(manager, a)
    manager.uncache_blocks(a)
    manager.free(a)
    assert manager.get_computed_blocks(make_request("b", [1] * 9)).num_tokens == 0
    assert manager.pool.num_free == 20


def test_groups_agree_on_the_longest_hit_that_all_have() -> None:
    """The window's blocks before position 11 are gone, so a shorter prefix than 16 tokens has no window."""
    manager = make_manager((FULL, WINDOW))
    a = make_request("a", list(range(16)))
    compute(manager, a)
    a.all_token_ids += [7] * 8
    manager.allocate_slots(a, 8)
    assert a.block_ids[1][:2] == [0, 0]
    assert all(a.block_ids[0])
    full = manager.get_computed_blocks(make_request("b", [*range(16), 0]))
    assert full.num_tokens == 16
    assert full.block_ids == [a.block_ids[0][:4], [0, 0, *a.block_ids[1][2:4]]]
    manager.free(a)
    window_blocks = full.block_ids[1]
    manager.pool.uncache(window_blocks[3])
    shorter = manager.get_computed_blocks(make_request("c", [*range(16), 0]))
    assert shorter.num_tokens == 12  # blocks 1 and 2 of the window are free, but not reused yet
    manager.pool.uncache(window_blocks[2])
    assert manager.get_computed_blocks(make_request("d", [*range(16), 0])).num_tokens == 8


def test_one_group_without_the_prefix_means_no_hit() -> None:
    manager = make_manager((FULL, WINDOW))
    a = make_request("a", list(range(8)))
    compute(manager, a)
    for block in a.block_ids[1]:
        manager.pool.uncache(block)
    hit = manager.get_computed_blocks(make_request("b", [*range(8), 0]))
    assert hit.num_tokens == 0
    assert hit.block_ids == [[], []]


@pytest.mark.parametrize(
    "groups, num_blocks, most",
    [((FULL,), 3, 12), ((FULL, FULL), 6, 12), ((FULL, FULL), 7, 12), ((WINDOW,), 3, None), ((WINDOW,), 2, 8)],
)
def test_fits_alone(groups: tuple[KVCacheGroup, ...], num_blocks: int, most: int | None) -> None:
    manager = make_manager(groups, num_blocks)
    fitting = [count for count in range(1, 100) if manager.fits_alone(count)]
    assert fitting == list(range(1, 100 if most is None else most + 1))
