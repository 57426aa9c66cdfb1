"""Tile sizes of the TPU kernels: a measurement from ``tpu_tuning.json`` where there is one, else a heuristic.

The heuristic: walk ``kv_chunk`` keys at a time (long copies, few loop steps) and take as many queries at once as give
``score_rows`` rows of scores to a product (``score_rows`` / group queries, between 16 and 128), then halve the larger
of the two until everything the kernel keeps in VMEM fits into ``vmem_share`` of it; what is left is the compiler's.
Block tables live in SMEM: rows are taken in groups whose tables fit into ``smem_share`` of it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from pallas_kernels.tpu_generations import generation_of as generation_of
from pallas_kernels.tpu_generations import generations

LANES = 128
MIN_QUERY_TILE, MAX_QUERY_TILE = 16, 128
MIN_KV_CHUNK = 128


@functools.cache
def tuning_table() -> Mapping[str, Any]:
    """The package's table: generations, the heuristic's constants, measurements."""
    table = json.loads(resources.files(__package__).joinpath("tpu_tuning.json").read_text())
    return {"generations": generations(), **table}


@dataclass(frozen=True)
class Problem:
    """What tile sizes depend on, as one device sees it.

    Args:
        num_tokens: T.
        num_heads, num_kv_heads: H, K.
        parts: arrays a KV head has: 2 (keys, values), or 1 where both share the lanes.
        lanes: elements of a stored row, a multiple of 128.
        block_size: tokens a block.
        cache_bytes, compute_bytes: bytes of an element of the cache, and of the products' operands.
    """

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    parts: int
    lanes: int
    block_size: int
    cache_bytes: int
    compute_bytes: int


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of one call.

    Args:
        query_tile: queries taken at once of rows with several.
        kv_chunk: keys walked at once, a multiple of the block size.
        table_bytes: bytes of block tables that one call may keep in SMEM.
        cores: TensorCores that one device drives.
        vmem_limit: bytes of VMEM the compiler may use.
    """

    query_tile: int
    kv_chunk: int
    table_bytes: int
    cores: int
    vmem_limit: int


def vmem_bytes(problem: Problem, query_tile: int, kv_chunk: int) -> int:
    """Bytes of VMEM the attention kernel's buffers take, temporaries of the scores included."""
    rows = problem.num_heads * query_tile
    copies = 2 * problem.parts * problem.num_kv_heads * kv_chunk * problem.lanes * problem.cache_bytes
    if problem.cache_bytes == 1:  # int8's scales
        copies += 2 * 2 * max(problem.num_kv_heads, 8) * kv_chunk * 4
    queries = rows * problem.lanes * (2 * 4 + problem.compute_bytes)
    results = rows * (problem.lanes * (2 * 4 + 4) + 2 * LANES * 4)
    scores = 6 * rows // problem.num_kv_heads * kv_chunk * 4
    decode = 8 * problem.num_kv_heads * (problem.num_heads // problem.num_kv_heads + 8) * problem.lanes * 4
    return copies + queries + results + scores + decode


def choose_tiles(generation: str, problem: Problem, table: Mapping[str, Any] | None = None) -> Tiles:
    """Tile sizes for a problem on a generation of TPU.

    Args:
        generation: a name in the table.
        problem: the shapes of one device's share.
        table: instead of the package's.

    Raises:
        ValueError: when even the smallest tiles exceed VMEM.
    """
    table = tuning_table() if table is None else table
    chip, rule = table["generations"][generation], table["heuristic"]
    vmem = chip["vmem_mib"] << 20
    budget = int(vmem * rule["vmem_share"])
    query_tile, kv_chunk = _measured(generation, problem, table) or _heuristic(problem, rule, budget)
    used = vmem_bytes(problem, query_tile, kv_chunk)
    if used > budget:
        raise ValueError(
            f"attention with {problem.num_heads} query and {problem.num_kv_heads} key/value heads a device needs "
            f"{used >> 20} MiB of VMEM at blocks of {problem.block_size}, {generation} has {budget >> 20} for it: "
            "use smaller blocks, a larger tensor-parallel size, or the portable blocked attention"
        )
    return Tiles(
        query_tile,
        kv_chunk,
        int(chip["smem_kib"] * 1024 * rule["smem_share"]),
        chip["cores"],
        int(vmem * 0.9),
    )


def _measured(generation: str, problem: Problem, table: Mapping[str, Any]) -> tuple[int, int] | None:
    """Tiles of the measurement taken at these shapes, if any; block size and T do not have to match."""
    for entry in table["measured"]:
        if entry["generation"] == generation and all(
            entry[name] == getattr(problem, name)
            for name in ("num_heads", "num_kv_heads", "lanes", "cache_bytes")
        ):
            chunk = max(1, entry["kv_chunk"] // problem.block_size) * problem.block_size
            return min(entry["query_tile"], _largest_query_tile(problem.num_tokens)), chunk
    return None


def _heuristic(problem: Problem, rule: Mapping[str, Any], budget: int) -> tuple[int, int]:
    block = problem.block_size
    group = problem.num_heads // problem.num_kv_heads
    wanted = 1 << max(0, (rule["score_rows"] // group).bit_length() - 1)
    query_tile = min(max(wanted, MIN_QUERY_TILE), _largest_query_tile(problem.num_tokens))
    kv_chunk = max(1, rule["kv_chunk"] // block) * block
    while vmem_bytes(problem, query_tile, kv_chunk) > budget:
        if kv_chunk >= 4 * query_tile and kv_chunk > max(block, MIN_KV_CHUNK):
            kv_chunk = max(kv_chunk // 2 // block, 1) * block
        elif query_tile > MIN_QUERY_TILE:
            query_tile //= 2
        elif kv_chunk > block:
            kv_chunk = max(kv_chunk // 2 // block, 1) * block
        else:
            break
    return query_tile, kv_chunk


def _largest_query_tile(num_tokens: int) -> int:
    """No tile needs to be larger than the step."""
    return min(MAX_QUERY_TILE, max(MIN_QUERY_TILE, 1 << max(0, num_tokens - 1).bit_length()))
