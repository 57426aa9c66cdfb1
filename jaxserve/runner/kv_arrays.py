"""Sizing the KV cache from the device's memory and the compiled programs' own needs."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from jaxserve.config import CacheConfig
from jaxserve.errors import OutOfMemoryError
from jaxserve.kv_cache_spec import KVCacheGroup, KVCacheSpec
from pallas_kernels.dispatch import AttentionBackend
from pallas_kernels.kv_cache_update.quantized import abstract_cache
from pallas_kernels.mla_attention.dispatch import LatentBackend

MIB = 1 << 20
PROGRAM_RESERVE = 256 * MIB
"""Device memory left for the programs' code and the allocator's fragmentation."""


@dataclass(frozen=True)
class MemoryBudget:
    """What one device has, in bytes. ``total`` is what the process may use."""

    total: int
    in_use: int
    program_temporaries: int

    @property
    def for_cache(self) -> int:
        return self.total - self.in_use - self.program_temporaries - PROGRAM_RESERVE


COARSE_BLOCKS = 64
"""A large cache is a multiple of so many blocks: its size is part of every program, and a few bytes more in use at one
start than at another should not make other programs."""


def single_group(specs: list[KVCacheSpec]) -> KVCacheGroup:
    """All layers under one block table.

    Layers of one window free blocks behind it; where windows differ, the table serves the layer that sees most, and
    the others mask.
    """
    windows = [spec.sliding_window for spec in specs]
    widest = None if None in windows else max(w for w in windows if w is not None)
    return KVCacheGroup(tuple(range(len(specs))), replace(specs[0], sliding_window=widest))


def bytes_per_block(
    specs: list[KVCacheSpec], block_size: int, backend: AttentionBackend | LatentBackend
) -> int:
    """Bytes one block takes over all layers, in the backend's layout (which may pad heads), int8's scales included."""
    shapes = (backend.kv_cache_shape(1, block_size, spec.num_kv_heads, spec.head_size) for spec in specs)
    caches = [
        abstract_cache(shape, spec.dtype, 1, block_size) for shape, spec in zip(shapes, specs, strict=True)
    ]
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(caches))


def device_budget(
    devices: Sequence[jax.Device], share: float, program_temporaries: int
) -> MemoryBudget | None:
    """The memory of the device that has least of it free, or None where they do not tell (CPU)."""
    budgets = [
        _budget(device.memory_stats() or {}, device.platform, share, program_temporaries)
        for device in devices
    ]
    known = [budget for budget in budgets if budget is not None]
    return min(known, key=lambda budget: budget.for_cache) if known else None


def _budget(
    stats: dict[str, int], platform: str, share: float, program_temporaries: int
) -> MemoryBudget | None:
    limit = stats.get("bytes_limit")
    if not limit:
        return None
    return MemoryBudget(
        min(limit, int(_memory(limit, platform) * share)), stats["bytes_in_use"], program_temporaries
    )


def device_memory(device: jax.Device) -> int | None:
    """Bytes of a device, None if it does not tell (CPU)."""
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return int(_memory(limit, device.platform)) if limit else None


def _memory(limit: int, platform: str) -> float:
    return limit / _pool_fraction() if platform == "gpu" else limit


def _pool_fraction() -> float:
    """The part of a GPU's memory that JAX's allocator was given, of which ``bytes_limit`` tells the size."""
    return float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or 0.75)


def choose_num_blocks(
    config: CacheConfig,
    budget: MemoryBudget | None,
    block_bytes: int,
    block_size: int,
    max_model_len: int | None,
) -> int:
    """Blocks of the pool, the dummy included.

    Args:
        config: resolved: on CPU ``kv_cache_memory_bytes`` is set.
        budget: None where the device does not tell its memory.
        block_bytes: of one block over all layers.
        block_size: tokens a block.
        max_model_len: tokens of the longest request, which must fit; None takes what there is.

    Raises:
        OutOfMemoryError: saying by how much it does not fit, and what to lower.
    """
    needed = 2 if max_model_len is None else -(-max_model_len // block_size) + 1
    if config.num_gpu_blocks_override is not None:
        num_blocks, source = config.num_gpu_blocks_override, "num_gpu_blocks_override"
    elif config.kv_cache_memory_bytes is not None:
        num_blocks, source = config.kv_cache_memory_bytes // block_bytes, "kv_cache_memory_bytes"
    elif budget is not None:
        num_blocks, source = budget.for_cache // block_bytes, "gpu_memory_utilization"
        if num_blocks > 16 * COARSE_BLOCKS:
            num_blocks -= num_blocks % COARSE_BLOCKS
    else:
        raise OutOfMemoryError(
            "This device does not report its memory; set --kv-cache-memory-bytes.",
            param="kv_cache_memory_bytes",
        )
    if num_blocks >= needed:
        return num_blocks
    have, want = max(0, num_blocks) * block_bytes, needed * block_bytes
    used = ""
    if source == "gpu_memory_utilization" and budget is not None:
        used = (
            f" Of {budget.total / MIB:,.0f} MiB allowed, weights and state take {budget.in_use / MIB:,.0f} and "
            f"programs {budget.program_temporaries / MIB:,.0f}."
        )
    longest = max(0, num_blocks - 1) * block_size
    advice = (
        f"Lower --max-model-len to {longest:,} or less (or set it to auto),"
        if longest
        else "Not one block fits:"
    )
    raise OutOfMemoryError(
        f"The KV cache gets {have / MIB:,.1f} MiB from {source}, but one request of "
        f"{(needed - 1) * block_size:,} tokens needs {want / MIB:,.1f} MiB: {(want - have) / MIB:,.1f} MiB are missing."
        f"{used} {advice} lower --max-num-batched-tokens or --max-num-seqs, or raise {source}.",
        param=source,
    )
