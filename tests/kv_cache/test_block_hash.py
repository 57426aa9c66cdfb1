"""Block hashes stand for the whole prefix and for nothing else."""

from __future__ import annotations

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_harness import make_request

from jaxserve.kv_cache.block_hash import block_hash, extend_block_hashes, root_hash


def test_a_hash_depends_on_every_token_their_order_and_the_parent() -> None:
    root = root_hash(())
    base = block_hash(root, [1, 2, 3, 4])
    assert base == block_hash(root, [1, 2, 3, 4])
    others = [
        block_hash(root, [1, 2, 3, 5]),
        block_hash(root, [4, 3, 2, 1]),
        block_hash(root, [1, 2, 3]),
        block_hash(root, [0, 1, 2, 3, 4]),
        block_hash(base, [1, 2, 3, 4]),
        block_hash(root_hash(("salt",)), [1, 2, 3, 4]),
    ]
    assert len({base, *others}) == 1 + len(others)


def test_roots_tell_all_lists_of_extra_keys_apart() -> None:
    keys = [None, "", "a", "b", "ab", "a\0", "é"]
    lists = [combination for n in range(3) for combination in itertools.product(keys, repeat=n)]
    assert len({root_hash(extra) for extra in lists}) == len(lists)


def test_token_ids_outside_int32_are_refused() -> None:
    with pytest.raises(struct.error):
        block_hash(b"", [2**31])


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.integers(1, 5), st.integers(0, 39))
def test_hashes_do_not_depend_on_when_they_were_computed(tokens: list[int], size: int, cut: int) -> None:
    whole = make_request("whole", tokens)
    grown = make_request("grown", tokens[: max(1, min(cut, len(tokens)))])
    extend_block_hashes(grown, size)
    grown.all_token_ids[:] = tokens
    assert extend_block_hashes(grown, size) == extend_block_hashes(whole, size)
    assert len(whole.block_hashes) == len(tokens) // size


@given(st.lists(st.integers(0, 1), max_size=12), st.lists(st.integers(0, 1), max_size=12), st.integers(1, 3))
def test_equal_hashes_mean_equal_prefixes(left: list[int], right: list[int], size: int) -> None:
    hashes = [extend_block_hashes(make_request("r", tokens or [0]), size) for tokens in (left, right)]
    for index, (a, b) in enumerate(zip(*hashes)):
        end = (index + 1) * size
        assert (a == b) == ((left or [0])[:end] == (right or [0])[:end])


def test_the_cache_salt_sets_requests_apart() -> None:
    salts = [None, "", "tenant-1", "dGVuYW50LTE="]
    hashes = [extend_block_hashes(make_request("r", [1] * 8, cache_salt=salt), 4) for salt in salts]
    assert len({chain[0] for chain in hashes}) == len({chain[1] for chain in hashes}) == len(salts)
