"""TpuAttentionBackend: attention over the paged cache on TPU, by Mosaic kernels.

A layer's cache is [num_blocks, P, K, block_size, L]. L is the head size rounded up to 128 lanes, P is 2 (keys, then
values). Heads of up to 64 share lanes instead: P is 1, keys in the lower half of 128 lanes, values in the upper. The
scales of an int8 cache lie beside it, [num_blocks, 2, K, block_size].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_cache_update.quantized import (
    FLOAT8,
    INT8,
    KVCache,
    ScaledCache,
    quantize_tokens,
    scatter_scales,
    to_cache_type,
    values_of,
)
from pallas_kernels.kv_cache_update.tpu import kv_cache_update, write_tile
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.options import AttentionOptions
from pallas_kernels.ragged_paged_attention.tpu_kernel import MASKED, attend
from pallas_kernels.ragged_paged_attention.tpu_tuning import (
    LANES,
    Problem,
    Tiles,
    choose_tiles,
    generation_of,
)
from pallas_kernels.ragged_paged_attention.tpu_work import decode_items, tile_items

PORTABLE = "the portable blocked attention (BlockedBackend) can"
MAX_GROUP = 16
MAX_HEAD_SIZE = 256
BLOCK_SIZES = (16, 32, 64, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")
KV_DTYPES = ("bfloat16", "float32", FLOAT8.name, INT8.name)


def supported(
    head_size: int,
    group: int,
    block_size: int,
    dtype: Any,
    options: AttentionOptions | None = None,
    kv_dtype: Any = None,
) -> str | None:
    """Why the TPU kernels cannot serve such a layer, with what can; None when they can.

    Args:
        head_size: D.
        group: query heads a KV head.
        block_size: tokens a block.
        dtype: of queries, and of the cache where ``kv_dtype`` is None.
        options: of the layer.
        kv_dtype: of the cache.
    """
    name = jnp.dtype(dtype).name
    kv_name = name if kv_dtype is None else jnp.dtype(kv_dtype).name
    smallest = LANES if kv_name == INT8.name else write_tile(kv_name) if kv_name in KV_DTYPES else 0
    if name not in DTYPES:
        reason = f"dtype {name} (use bfloat16 or float32)"
    elif kv_name not in KV_DTYPES:
        reason = f"a {kv_name} cache (set --kv-cache-dtype to bfloat16, float32, fp8 or int8)"
    elif not 1 <= head_size <= MAX_HEAD_SIZE:
        reason = f"head size {head_size} (at most {MAX_HEAD_SIZE})"
    elif not 1 <= group <= MAX_GROUP:
        reason = f"groups of {group} query heads (at most {MAX_GROUP})"
    elif block_size not in BLOCK_SIZES:
        reason = f"block size {block_size} (use one of {', '.join(map(str, BLOCK_SIZES))})"
    elif block_size < smallest:
        reason = f"a {kv_name} cache in blocks of {block_size} (set --block-size to {smallest} or more)"
    elif options is not None and options.sliding_window is not None and options.sliding_window < 1:
        reason = f"sliding window {options.sliding_window} (a query sees at least itself)"
    else:
        return None
    return f"The TPU attention kernels do not do {reason}; {PORTABLE}."


@dataclass(frozen=True)
class TpuAttentionBackend:
    """Attention on one generation of TPU.

    Args:
        generation: ``v5e``, ``v5p``, ``v6e``, ``tpu7x`` or a device kind that the tuning table knows.
        interpret: ``pltpu.InterpretParams`` runs the kernels on a CPU.
        tiles: instead of the tuning table's choice.
    """

    generation: str
    interpret: Any = False
    tiles: Tiles | None = None
    name = "tpu"
    separate_paths = True

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """[num_blocks, P, K, block_size, L]."""
        parts, lanes = _stored(head_size)
        return (num_blocks, parts, num_kv_heads, block_size, lanes)

    def block_axis(self) -> int:
        return 0

    def prepare(self, metadata: AttentionMetadata, options: AttentionOptions, **sizes: Any) -> None:
        """The kernel reads the batch's own arrays: nothing to work out."""
        return

    def update_and_attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: jax.Array | None = None,
        plan: None = None,
    ) -> tuple[jax.Array, KVCache]:
        """See ``AttentionBackend``. Padding tokens' output is zero.

        Raises:
            ValueError: shapes or types the kernels cannot do (see ``supported``).
        """
        num_heads, head_size = q.shape[1:]
        values = values_of(kv_cache)
        reason = supported(
            head_size, num_heads // k.shape[1], values.shape[3], q.dtype, options, values.dtype
        )  # fmt: skip
        if reason is not None:
            raise ValueError(reason)
        if sinks is None:
            sinks = jnp.full(num_heads, MASKED, jnp.float32)

        return self._on_device(q, k, v, kv_cache, metadata, options, sinks)

    def _on_device(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: jax.Array,
    ) -> tuple[jax.Array, KVCache]:
        """One device's heads."""
        num_tokens, num_heads, head_size = q.shape
        values = values_of(kv_cache)
        _, parts, kv_heads, block, lanes = values.shape
        num_rows = metadata.seq_lens.shape[0]
        scales = None
        if isinstance(kv_cache, ScaledCache):
            (k, k_scales), (v, v_scales) = quantize_tokens(k), quantize_tokens(v)
            new_scales = jnp.stack([k_scales, v_scales], axis=1)
            scales = scatter_scales(kv_cache.scales, new_scales, metadata.slot_mapping)
        else:
            k, v = (to_cache_type(x, values.dtype) for x in (k, v))
        values = kv_cache_update(
            values, _stack(k, v, parts, lanes), metadata.slot_mapping, num_rows, self.interpret
        )
        compute = _compute_type(q.dtype, values.dtype)
        problem = Problem(
            num_tokens, num_heads, kv_heads, parts, lanes, block, values.dtype.itemsize, compute.itemsize
        )
        tiles = self.tiles or choose_tiles(generation_of(self.generation), problem)
        queries = jnp.pad(q.astype(jnp.float32), ((0, tiles.query_tile), (0, 0), (0, lanes - head_size)))
        out = _blank(metadata, (num_tokens, num_heads, lanes))
        group = num_heads // kv_heads
        sinks = jnp.broadcast_to(
            sinks.astype(jnp.float32).reshape(kv_heads, group, 1), (kv_heads, group, LANES)
        )
        # Rows whose block tables SMEM holds at a time: all of them, unless contexts are very long.
        rows_per_call = max(1, min(num_rows, tiles.table_bytes // (4 * metadata.block_tables.shape[1])))
        for row in range(0, num_rows, rows_per_call):
            rows = min(rows_per_call, num_rows - row)
            out = attend(
                queries, values, out,
                decode_items(metadata, row, rows),
                tile_items(metadata, row, rows, tiles.query_tile, num_tokens),
                metadata.block_tables[row : row + rows], sinks, options, tiles, compute, self.interpret,
                scales,
            )  # fmt: skip
        out = out[:, :, head_size : 2 * head_size] if parts == 1 else out[:, :, :head_size]
        return out.astype(q.dtype), values if scales is None else ScaledCache(values, scales)


def tpu_backend(device: jax.Device) -> TpuAttentionBackend:
    """The backend of a TPU.

    Raises:
        ValueError: for a generation that the tuning table does not list.
    """
    return TpuAttentionBackend(generation_of(device.device_kind))


def _compute_type(dtype: Any, kv_dtype: Any) -> Any:
    """Type of the products' operands; the chip has no float16, which bfloat16 does not hold."""
    if dtype == jnp.float16:
        return jnp.dtype(jnp.float32)
    return dtype if kv_dtype.itemsize == 1 else jnp.promote_types(dtype, kv_dtype)


def _blank(metadata: AttentionMetadata, shape: tuple[int, int, int]) -> jax.Array:
    """What the kernel fills in: zeros, and NaN for rows that a decode-only program leaves out: the wrong one ran."""
    if not metadata.decode_only:
        return jnp.zeros(shape, jnp.float32)
    token = jnp.arange(shape[0])
    left_out = (token >= metadata.distribution[0]) & (token < metadata.query_start_loc[-1])
    return jnp.broadcast_to(jnp.where(left_out, jnp.nan, 0.0)[:, None, None], shape)


def _stored(head_size: int) -> tuple[int, int]:
    """(P, L) of a head size."""
    if 2 * head_size <= LANES:
        return 1, LANES
    return 2, -(-head_size // LANES) * LANES


def _stack(k: jax.Array, v: jax.Array, parts: int, lanes: int) -> jax.Array:
    """[T, K, D] keys and values as the cache stores them: [T, P, K, L]."""
    if parts == 1:
        both = jnp.concatenate([k, v], axis=-1)[:, None]
    else:
        both = jnp.stack([k, v], axis=1)
    return jnp.pad(both, ((0, 0), (0, 0), (0, 0), (0, lanes - both.shape[-1])))


__all__ = ["TpuAttentionBackend", "supported", "tpu_backend"]
