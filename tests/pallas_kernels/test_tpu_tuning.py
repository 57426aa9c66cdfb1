"""Tile sizes of the TPU kernels, and the kernel's work lists."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import numpy as np
import pytest
from ragged_batches import build_metadata

from pallas_kernels.ragged_paged_attention.tpu_tuning import (
    Problem,
    choose_tiles,
    generation_of,
    tuning_table,
    vmem_bytes,
)
from pallas_kernels.ragged_paged_attention.tpu_work import (
    COUNT,
    POSITION,
    ROW,
    TOKEN,
    decode_items,
    tile_items,
)

pytestmark = pytest.mark.device

LLAMA_8B = Problem(2048, 32, 8, 2, 128, 16, cache_bytes=2, compute_bytes=2)


@pytest.mark.parametrize("generation", tuning_table()["generations"])
def test_tiles_fit_and_are_well_formed(generation):
    chip = tuning_table()["generations"][generation]
    shapes = itertools.product(
        (1, 8, 64, 2048), (1, 2, 8, 32), (1, 3, 4, 16), (128, 256), (16, 32, 256), (2, 4)
    )
    for num_tokens, kv_heads, group, lanes, block, size in shapes:
        two_blocks = 2 * 2 * kv_heads * block * lanes * size
        if kv_heads * group > 128 or two_blocks > chip["vmem_mib"] << 17:
            continue  # no such model on one device, or its blocks alone take a quarter of what there is
        problem = Problem(num_tokens, kv_heads * group, kv_heads, 2, lanes, block, size, size)
        tiles = choose_tiles(generation, problem)
        assert tiles.query_tile & (tiles.query_tile - 1) == 0
        assert tiles.query_tile >= 16
        assert tiles.kv_chunk % block == 0
        assert vmem_bytes(problem, tiles.query_tile, tiles.kv_chunk) <= chip["vmem_mib"] << 19
        assert tiles.table_bytes < chip["smem_kib"] << 10


def test_the_heuristic():
    assert choose_tiles("v6e", LLAMA_8B).query_tile == 64
    assert choose_tiles("v6e", LLAMA_8B).kv_chunk == 512
    assert choose_tiles("v6e", replace(LLAMA_8B, num_tokens=8)).query_tile == 16


def test_what_exceeds_vmem_is_refused():
    with pytest.raises(ValueError, match=r"MiB of VMEM.*blocked"):
        choose_tiles("v5p", replace(LLAMA_8B, num_heads=4096, num_kv_heads=1024))


def test_a_measurement_wins():
    table = tuning_table()
    entry = {
        "generation": "v6e", "num_heads": 32, "num_kv_heads": 8, "lanes": 128, "cache_bytes": 2,
        "query_tile": 32, "kv_chunk": 1024,
    }  # fmt: skip
    tiles = choose_tiles("v6e", LLAMA_8B, {**table, "measured": [entry]})
    assert (tiles.query_tile, tiles.kv_chunk) == (32, 1024)
    other = choose_tiles("v5e", LLAMA_8B, {**table, "measured": [entry]})
    assert other == choose_tiles("v5e", LLAMA_8B)


def test_device_kinds():
    assert generation_of("TPU v6 lite") == "v6e"
    assert generation_of("tpu7x") == "tpu7x"
    with pytest.raises(ValueError, match="TPU v99"):
        generation_of("TPU v99")


def test_work_items_cover_every_live_query_once():
    """Of any batch, also when its rows are taken in two parts."""
    rng = np.random.default_rng(0)
    num_tokens, num_rows, tile, parts = 160, 9, 16, ((0, 4), (4, 5))

    @jax.jit
    def lists(metadata):
        both = []
        for first, count in parts:
            decodes = decode_items(metadata, first, count)
            both.append((decodes, tile_items(metadata, first, count, tile, num_tokens)))
        return both

    for _ in range(40):
        decode = [(int(rng.integers(1, 90)), 1) for _ in range(rng.integers(0, 5))]
        longer = [int(rng.integers(2, 40)) for _ in range(rng.integers(0, 5))]
        rows = decode + [(new + int(rng.integers(0, 50)), new) for new in longer]
        metadata = build_metadata(
            rows, [0] * len(rows), num_tokens, num_rows, 1, np.zeros(num_tokens, np.int32)
        )
        seen = []
        for (first, _), part in zip(parts, lists(metadata)):
            for items, limit in zip(part, (1, tile)):
                number, fields = int(items[0]), np.asarray(items[1:]).reshape(4, -1)
                assert number <= fields.shape[1]
                for item in fields[:, :number].T:
                    assert 1 <= item[COUNT] <= limit
                    for i in range(item[COUNT]):
                        seen.append((item[TOKEN] + i, item[ROW] + first, item[POSITION] + i))
        live = int(metadata.query_start_loc[-1])
        arrays = (range(live), np.asarray(metadata.row_ids)[:live], np.asarray(metadata.positions)[:live])
        assert sorted(seen) == sorted(zip(*arrays))
