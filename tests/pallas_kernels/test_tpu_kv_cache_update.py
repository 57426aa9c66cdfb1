"""The TPU's cache write against the oracle, interpreted on a CPU, and its list of tiles."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_interpreter import COMPILER_OPTIONS, races_found, strict

from pallas_kernels.kv_cache_update.tpu import kv_cache_update, write_tile, write_tiles

pytestmark = pytest.mark.device

NUM_BLOCKS, BLOCK_SIZE, NUM_TOKENS, NUM_ROWS = 9, 32, 24, 6

RUNS = {
    "nothing": [],
    "single tokens": [(40, 1), (95, 1), (96, 1)],
    "across tiles and blocks": [(44, 8), (200, 9)],
    "a whole tile": [(64, 16), (130, 1)],
    "the last slot": [(NUM_BLOCKS * BLOCK_SIZE - 1, 1)],
}


def slots_of(runs: list[tuple[int, int]]) -> np.ndarray:
    """Slots of runs (first slot, length), then padding out of range."""
    slots = np.full(NUM_TOKENS, NUM_BLOCKS * BLOCK_SIZE, np.int32)
    live = [first + i for first, length in runs for i in range(length)]
    slots[: len(live)] = live
    return slots


def expected_update(cache: np.ndarray, new: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Token by token."""
    cache = cache.copy()
    for token, slot in enumerate(slots):
        if slot < NUM_BLOCKS * BLOCK_SIZE:
            cache[slot // BLOCK_SIZE, :, :, slot % BLOCK_SIZE] = new[token]
    return cache


@pytest.mark.parametrize("dtype,parts,kv_heads", [("float32", 1, 2), ("bfloat16", 2, 1)])
def test_equals_the_oracle(dtype, parts, kv_heads):
    rng = np.random.default_rng(0)
    update = jax.jit(
        lambda cache, new, slots: kv_cache_update(cache, new, slots, NUM_ROWS, strict()),
        compiler_options=COMPILER_OPTIONS,
    )
    for runs in RUNS.values():
        slots = slots_of(runs)
        cache = jnp.asarray(rng.standard_normal((NUM_BLOCKS, parts, kv_heads, BLOCK_SIZE, 128)), dtype)
        cache = cache.at[::2].set(jnp.nan)  # never written
        new = jnp.asarray(rng.standard_normal((NUM_TOKENS, parts, kv_heads, 128)), dtype)
        new = jnp.where((slots < NUM_BLOCKS * BLOCK_SIZE)[:, None, None, None], new, jnp.nan)
        got = update(cache, new, jnp.asarray(slots))
        assert got.dtype == cache.dtype
        assert not races_found()
        arrays = (np.asarray(array, np.float32) for array in (cache, new))
        np.testing.assert_array_equal(np.asarray(got, np.float32), expected_update(*arrays, slots))


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_tiles_cover_every_slot_once(dtype):
    """Any rows: the list has room, and its tiles hold the live slots, each one once and in one tile."""
    rng = np.random.default_rng(1)
    num_slots, num_rows, num_tokens = 4096, 8, 320
    list_tiles = jax.jit(write_tiles, static_argnums=(1, 2, 3))
    tile = write_tile(dtype)
    for _ in range(50):
        lengths = rng.integers(0, 41, num_rows) * (rng.random(num_rows) < 0.8)
        slots, at = np.full(num_tokens, num_slots, np.int32), 0
        for row, length in enumerate(lengths):
            first = row * 512 + int(rng.integers(0, 400))
            slots[at : at + length] = np.arange(first, first + length)
            at += length
        tiles = np.asarray(list_tiles(jnp.asarray(slots), num_slots, num_rows, tile))
        count, fields = tiles[0], tiles[1:].reshape(3, -1)
        assert count <= fields.shape[1]
        written = []
        for token, slot, length in fields[:, :count].T:
            assert length >= 1
            assert slot // tile == (slot + length - 1) // tile
            np.testing.assert_array_equal(slots[token : token + length], np.arange(slot, slot + length))
            written += range(slot, slot + length)
        assert sorted(written) == sorted(slots[slots < num_slots])
