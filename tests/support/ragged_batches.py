"""Random ragged batches over a paged cache whose unused slots hold NaN, for testing attention kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kv_cache_update.quantized import INT8, KVCache, ScaledCache, to_cache_type
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata


@dataclass(frozen=True)
class RaggedBatch:
    q: jax.Array
    k: jax.Array
    v: jax.Array
    kv_cache: KVCache
    metadata: AttentionMetadata
    rows: tuple[tuple[int, int], ...]

    def only_rows(self, kept: list[int]) -> RaggedBatch:
        """The same rows without some of the decoding ones' company (decoding rows only), same padded shapes."""
        starts = np.asarray(self.metadata.query_start_loc)[kept]
        pick = np.zeros(self.q.shape[0], np.int64)
        pick[: len(kept)] = starts
        num_slots = self.kv_cache.shape[1] * self.kv_cache.shape[3]
        slots = np.full(self.q.shape[0], num_slots, np.int32)
        slots[: len(kept)] = np.asarray(self.metadata.slot_mapping)[starts]
        metadata = build_metadata(
            [self.rows[r] for r in kept], np.asarray(self.metadata.block_tables)[kept], self.q.shape[0],
            self.metadata.seq_lens.shape[0], self.metadata.block_tables.shape[1], slots,
        )  # fmt: skip
        return replace(self, q=self.q[pick], k=self.k[pick], v=self.v[pick], metadata=metadata)


def in_cache_type(kv_cache: jax.Array, dtype: object) -> KVCache:
    """A float cache [2, num_blocks, K, block_size, D] in another type; NaN stays NaN, of int8 the scale is."""
    if jnp.dtype(dtype) != INT8:
        return to_cache_type(kv_cache, dtype)
    wide = kv_cache.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=-1) / 127
    values = jnp.where(jnp.isnan(wide), 111, jnp.round(wide / scales[..., None])).astype(jnp.int8)
    return ScaledCache(values, jnp.moveaxis(scales, 0, 1))


def build_metadata(rows, tables, num_tokens, num_rows, width, slots) -> AttentionMetadata:
    """Pad ``rows`` of (context with the new tokens, new tokens) to [num_tokens] and [num_rows]."""
    seq_lens = np.zeros(num_rows, np.int32)
    block_tables = np.zeros((num_rows, width), np.int32)
    starts = np.zeros(num_rows + 1, np.int32)
    positions = np.zeros(num_tokens, np.int32)
    row_ids = np.full(num_tokens, num_rows - 1, np.int32)
    at = 0
    for index, (context, new) in enumerate(rows):
        seq_lens[index] = context
        block_tables[index] = tables[index]
        positions[at : at + new] = np.arange(context - new, context)
        row_ids[at : at + new] = index
        at += new
        starts[index + 1] = at
    starts[len(rows) + 1 :] = at
    decode = 0
    while decode < len(rows) and rows[decode][1] == 1:
        decode += 1
    distribution = np.asarray([decode, decode, len(rows)], np.int32)
    arrays = (seq_lens, block_tables, starts, distribution, slots, positions, row_ids)
    return AttentionMetadata(*map(jnp.asarray, arrays))


def ragged_batch(
    rows,
    *,
    heads=6,
    kv_heads=3,
    head_size=64,
    block_size=16,
    seed=0,
    dtype=jnp.float32,
    pad_tokens=7,
    pad_rows=2,
    width=None,
    num_blocks=None,
) -> RaggedBatch:
    """A batch of ``rows`` (context with the new tokens, new tokens), decode rows first, in shuffled blocks.

    Slots no row has written yet hold NaN, and so do the padding tokens' q, k and v. ``width`` of the block tables and
    ``num_blocks`` of the cache are what the rows need, unless they are given so that batches share a program.
    """
    rng = np.random.default_rng(seed)
    live = sum(new for _, new in rows)
    num_rows = len(rows) + pad_rows
    num_tokens = max(live + pad_tokens, num_rows)
    needed = [-(-context // block_size) for context, _ in rows]
    width = width or max([1, *needed]) + 1
    num_blocks = num_blocks or sum(needed) + 3
    ids = list(rng.permutation(np.arange(1, num_blocks)))
    tables = np.zeros((len(rows), width), np.int32)
    cache = np.full((2, num_blocks, kv_heads, block_size, head_size), np.nan, np.float32)
    slots = np.full(num_tokens, num_blocks * block_size, np.int32)
    at = 0
    for index, (context, new) in enumerate(rows):
        for logical in range(needed[index]):
            tables[index, logical] = ids.pop()
        for position in range(context):
            block, offset = tables[index, position // block_size], position % block_size
            if position < context - new:
                cache[:, block, :, offset] = rng.standard_normal((2, kv_heads, head_size))
            else:
                slots[at] = block * block_size + offset
                at += 1
    poisoned = [
        np.concatenate([
            rng.standard_normal((live, h, head_size)), np.full((num_tokens - live, h, head_size), np.nan)
        ])
        for h in (heads, kv_heads, kv_heads)
    ]  # fmt: skip
    q, k, v = (jnp.asarray(x, dtype) for x in poisoned)
    metadata = build_metadata(rows, tables, num_tokens, num_rows, width, slots)
    return RaggedBatch(q, k, v, jnp.asarray(cache, dtype), metadata, tuple(rows))
