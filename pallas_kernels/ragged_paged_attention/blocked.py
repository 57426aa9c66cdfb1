"""Blocked attention in plain XLA: the CPU's implementation, and the portable one of GPUs that have no kernel.

Central idea: work is cut into tiles whose number is dynamic, so that cost follows the live context and not the padded
one. Single queries (decoding rows; in steps of up to ``QUERY_TILE`` tokens every token) are sorted by context and taken
``ROW_TILE`` at a time; each tile walks the context of its longest. Longer rows of larger steps are cut into tiles of
``QUERY_TILE`` queries, each of which walks its own visible context. Both walk ``KV_TILE`` keys at absolute positions in
order with an online softmax in float32, so a row's result does not depend on the other rows: what lies beyond its own
end adds exact zeros.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kv_cache_update.quantized import KVCache, ScaledCache, as_bits, from_bits, values_of
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.options import AttentionOptions

ROW_TILE = 16
QUERY_TILE = 64
KV_TILE = 128
"""Keys walked in one step of a loop; a larger block is walked whole."""

MASKED = -1e30
"""Score of an invisible key: finite, so that a row with none visible yet gives no NaN."""


def blocked_attention(
    q: jax.Array,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    options: AttentionOptions,
    sinks: jax.Array | None = None,
    *,
    fixed_order: bool = False,
) -> jax.Array:
    """Attend each row's new tokens to its cached ones (the new ones are in the cache already).

    Args:
        q: [T, H, D].
        kv_cache: [2, num_blocks, K, block_size, D]; int8 with its scales.
        metadata: the step's batch, rows ordered decode first.
        options: scale, window, soft cap.
        sinks: [H] extra logits of the denominator.
        fixed_order: add up in one order whether queries are walked by rows or by tiles, so that a query's bits do not
            depend on what else is in the step (``Walk.weigh``).

    Returns:
        [T, H, D] in q's type; zero for padding tokens.
    """  # fmt: skip
    walk = _KeysAndValues(kv_cache, options, sinks, q.shape[1])
    walk.fixed_order = fixed_order
    return walk_context(q, metadata, walk)


def walk_context(q: jax.Array, metadata: AttentionMetadata, walk: Walk) -> jax.Array:
    """Attend q [T, H, D] to what ``walk`` gathers: [T, H, ``walk.value_size``] in q's type; zero for padding tokens."""
    num_tokens, num_heads, _ = q.shape
    if num_tokens <= QUERY_TILE or metadata.decode_only:
        # A small step: one path compiles in half the time, and there is little context to share between its queries.
        lengths = jnp.where(jnp.arange(num_tokens) < metadata.query_start_loc[-1], metadata.positions + 1, 0)
        return _single_queries(q, lengths, metadata.block_tables[metadata.row_ids], walk)
    num_rows = metadata.seq_lens.shape[0]
    lengths = jnp.where(jnp.arange(num_rows) < metadata.distribution[0], metadata.seq_lens, 0)
    out = _single_queries(q[:num_rows], lengths, metadata.block_tables, walk)
    rest = jnp.zeros((num_tokens - num_rows, num_heads, walk.value_size), q.dtype)
    return _query_tiles(q, jnp.concatenate([out, rest]), walk, metadata)


class Walk:
    """One layer's cache and options: gathers tiles of keys and values and scores them.

    Args:
        options: scale, window, soft cap.
        num_heads, num_kv_heads: H and K.
        block_size: tokens a block.
        value_size: elements of a value.
        dtype: of the cache.
        sinks: [H] extra logits of the denominator.
    """

    def __init__(
        self,
        options: AttentionOptions,
        num_heads: int,
        num_kv_heads: int,
        block_size: int,
        value_size: int,
        dtype: Any,
        sinks: jax.Array | None = None,
    ) -> None:
        self.options = options
        self.num_kv_heads, self.group = num_kv_heads, num_heads // num_kv_heads
        self.value_size, self.dtype = value_size, dtype
        self.blocks_per_tile = max(1, KV_TILE // block_size)
        self.tile = self.blocks_per_tile * block_size
        self.sinks = None if sinks is None else sinks.astype(jnp.float32).reshape(num_kv_heads, self.group)

    fixed_order = False
    """See ``blocked_attention``."""

    def weigh(self, equation: str, weights: jax.Array, v: jax.Array) -> jax.Array:
        """The weighted sum of values.

        In fixed order the values are widened to a multiple of 64: narrower products with few rows are computed by
        another algorithm than those with many (seen with Eigen's for 32, 80 and 96 columns).
        """
        if not self.fixed_order:
            return self.product(equation, weights, v)
        width = v.shape[-1]
        v = jnp.pad(v, ((0, 0),) * (v.ndim - 1) + ((0, -width % 64),))
        return self.product(equation, weights, v)[..., :width]

    def row_sums(self, weights: jax.Array) -> jax.Array:
        """Sums over the last axis; in fixed order as a product, since a reduction's order depends on its shape."""
        if not self.fixed_order:
            return weights.sum(-1)
        ones = jnp.ones((8, weights.shape[-1]), weights.dtype)
        flat = self.product("ms,ns->mn", weights.reshape(-1, weights.shape[-1]), ones)
        return flat[:, 0].reshape(weights.shape[:-1])

    def gather(self, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[..., C] physical blocks to float32 keys [..., K, C * block_size, D] and values, ``value_size`` wide."""
        raise NotImplementedError

    def product(self, equation: str, x: jax.Array, y: jax.Array) -> jax.Array:
        """A product of float32 arrays; of a float32 cache on every device in float32 (not in TF32)."""
        precision = jax.lax.Precision.HIGHEST if self.dtype == jnp.float32 else None
        return jnp.einsum(equation, x, y, precision=precision)

    def pad_tables(self, tables: jax.Array) -> jax.Array:
        """Widen block tables to whole tiles with the dummy block."""
        return jnp.pad(tables, ((0, 0), (0, -tables.shape[1] % self.blocks_per_tile)))

    def first_tile(self, first_query: jax.Array) -> jax.Array:
        """The first tile that a query at this position can see."""
        if self.options.sliding_window is None:
            return jnp.zeros((), jnp.int32)
        return jnp.maximum(first_query - self.options.sliding_window + 1, 0) // self.tile

    def cap(self, scores: jax.Array) -> jax.Array:
        cap = self.options.soft_cap
        return scores if cap is None else cap * jnp.tanh(scores / cap)

    def visible(self, keys: jax.Array, queries: jax.Array) -> jax.Array:
        """Which keys (positions) each query (position) sees."""
        mask = keys <= queries
        if self.options.sliding_window is not None:
            mask &= keys > queries - self.options.sliding_window
        return mask

    def finish(
        self, top: jax.Array, total: jax.Array, acc: jax.Array, head_axes: tuple[int, ...]
    ) -> jax.Array:
        """Normalise; ``head_axes`` are the axes of ``total`` that hold K and G."""
        if self.sinks is not None:
            shape = [1] * total.ndim
            for axis, size in zip(head_axes, self.sinks.shape):
                shape[axis] = size
            sink = self.sinks.reshape(shape)
            new_top = jnp.maximum(top, sink)
            rescale = jnp.exp(top - new_top)
            total = total * rescale + jnp.exp(sink - new_top)
            acc = acc * rescale[..., None]
        return acc / jnp.where(total == 0.0, 1.0, total)[..., None]


class _KeysAndValues(Walk):
    """Keys and values [2, num_blocks, K, block_size, D]; int8 with their scales."""

    def __init__(self, kv_cache: KVCache, options: AttentionOptions, sinks: jax.Array | None, num_heads: int):
        values = values_of(kv_cache)
        _, self.num_blocks, kv_heads, block_size, self.head_size = values.shape
        super().__init__(options, num_heads, kv_heads, block_size, self.head_size, values.dtype, sinks)
        self.scales = kv_cache.scales if isinstance(kv_cache, ScaledCache) else None
        self.flat = as_bits(values).reshape(2 * self.num_blocks * kv_heads, block_size, self.head_size)

    def gather(self, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[..., C] physical blocks -> keys and values [..., K, C * block_size, D], laid out as the products want."""
        heads = jnp.arange(self.num_kv_heads)[:, None]
        index = blocks[..., None, :] * self.num_kv_heads + heads  # [..., K, C]
        k = self._rows(index)
        v = self._rows(index + self.num_blocks * self.num_kv_heads)
        if self.scales is None:
            return k, v
        scales = self.scales.at[blocks].get(mode="promise_in_bounds")  # [..., C, 2, K, block_size]
        scales = jnp.moveaxis(scales, -4, -2)
        scales = scales.reshape(*scales.shape[:-2], self.tile, 1)  # [..., 2, K, tile, 1]
        return k * scales[..., 0, :, :, :], v * scales[..., 1, :, :, :]

    def _rows(self, index: jax.Array) -> jax.Array:
        """[..., K, C] rows of ``flat`` -> [..., K, C * block_size, D] float32."""
        rows = from_bits(self.flat.at[index].get(mode="promise_in_bounds"), self.dtype)
        return rows.reshape(*index.shape[:-1], self.tile, self.head_size).astype(jnp.float32)


def _single_queries(q: jax.Array, lengths: jax.Array, tables: jax.Array, walk: Walk) -> jax.Array:
    """N independent queries: q [N, H, D], context lengths [N] (0: none), tables [N, B] -> [N, H, value]."""
    num_queries, num_heads, head_size = q.shape
    order = jnp.argsort(-lengths)
    rank = jnp.argsort(order)
    tile_rows = min(ROW_TILE, num_queries)
    num_tiles = (jnp.sum(lengths > 0) + tile_rows - 1) // tile_rows
    pad = -num_queries % tile_rows
    order = jnp.pad(order, (0, pad))
    lengths = jnp.pad(lengths[order[:num_queries]], (0, pad))
    tables = walk.pad_tables(tables[order])
    qg = (
        q.astype(jnp.float32)[order].reshape(-1, walk.num_kv_heads, walk.group, head_size)
        * walk.options.scale
    )

    def row_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        start = index * tile_rows
        rows = partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=tile_rows)
        tile_out = _walk_rows(rows(qg), rows(lengths), rows(tables), walk)
        return jax.lax.dynamic_update_slice_in_dim(out, tile_out, start, 0)

    out = jnp.zeros((*qg.shape[:-1], walk.value_size), jnp.float32)
    out = jax.lax.fori_loop(0, num_tiles, row_tile, out)
    return out[rank].reshape(num_queries, num_heads, walk.value_size).astype(q.dtype)


def _walk_rows(q: jax.Array, lengths: jax.Array, tables: jax.Array, walk: Walk) -> jax.Array:
    """Online softmax of one query a row: q [r, K, G, D], lengths [r], tables [r, B] -> [r, K, G, value] float32."""
    group = q.shape[2]
    if (
        walk.fixed_order and group == 1
    ):  # a product with one row would be another algorithm than one with many
        q = jnp.pad(q, ((0, 0), (0, 0), (0, 1), (0, 0)))
    last = (lengths.max() + walk.tile - 1) // walk.tile
    shortest = jnp.where(lengths > 0, lengths, jnp.iinfo(jnp.int32).max).min()
    first = walk.first_tile(shortest - 1)
    queries = (lengths - 1)[:, None]

    def body(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        top, total, acc = carry
        blocks = jax.lax.dynamic_slice_in_dim(tables, index * walk.blocks_per_tile, walk.blocks_per_tile, 1)
        k, v = walk.gather(blocks)  # [r, K, tile, D and value]
        keys = (index * walk.tile + jnp.arange(walk.tile))[None]
        mask = walk.visible(keys, queries)[:, None, None]  # [r, 1, 1, tile]
        scores = jnp.where(mask, walk.cap(walk.product("rkgd,rksd->rkgs", q, k)), MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0.0)
        rescale = jnp.exp(top - new_top)
        # An invisible slot may be another row's by now, or never written and NaN; 0 * NaN is NaN.
        v = jnp.where(mask[:, :, 0, :, None], v, 0.0)
        added = walk.weigh("rkgs,rksd->rkgd", weights, v)
        return new_top, total * rescale + walk.row_sums(weights), acc * rescale[..., None] + added

    shape = q.shape[:3]
    init = (
        jnp.full(shape, MASKED, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, walk.value_size), jnp.float32),
    )
    top, total, acc = (x[:, :, :group] for x in jax.lax.fori_loop(first, last, body, init))
    return walk.finish(top, total, acc, (1, 2))


def _query_tiles(q: jax.Array, out: jax.Array, walk: Walk, metadata: AttentionMetadata) -> jax.Array:
    """Rows with several queries: fill their part of ``out`` [T, H, value], tile by tile."""
    num_tokens = q.shape[0]
    tile_q = min(QUERY_TILE, num_tokens)
    starts, ends = metadata.query_start_loc[:-1], metadata.query_start_loc[1:]
    row_ids = jnp.arange(starts.shape[0])
    in_tiles = (row_ids >= metadata.distribution[0]) & (row_ids < metadata.distribution[2])
    tiles_of_row = jnp.where(in_tiles, (ends - starts + tile_q - 1) // tile_q, 0)
    tile_ends = jnp.cumsum(tiles_of_row)
    tables = walk.pad_tables(metadata.block_tables)
    # A tile may reach past its row's end: what it writes there is overwritten by the later rows' own tiles, and
    # past the last row it falls on padding, which the final mask clears.
    q = jnp.pad(q, ((0, tile_q), (0, 0), (0, 0)))
    out = jnp.pad(out, ((0, tile_q), (0, 0), (0, 0)))

    def one_tile(index: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.searchsorted(tile_ends, index, side="right")
        start = starts[row] + (index - (tile_ends[row] - tiles_of_row[row])) * tile_q
        first_position = metadata.seq_lens[row] - ends[row] + start
        live = jnp.minimum(ends[row] - start, tile_q)
        q_tile = jax.lax.dynamic_slice_in_dim(q, start, tile_q)
        tile_out = _walk_queries(q_tile, first_position, live, tables[row], walk)
        return jax.lax.dynamic_update_slice_in_dim(out, tile_out.astype(out.dtype), start, 0)

    out = jax.lax.fori_loop(0, tile_ends[-1], one_tile, out)[:num_tokens]
    return jnp.where((jnp.arange(num_tokens) < metadata.query_start_loc[-1])[:, None, None], out, 0)


def _walk_queries(
    q: jax.Array, first_position: jax.Array, live: jax.Array, table: jax.Array, walk: Walk
) -> jax.Array:
    """Online softmax of one row's tile of queries: q [t, H, D], table [B] -> [t, H, value] float32."""
    tile_q, num_heads, head_size = q.shape
    grouped = q.astype(jnp.float32).reshape(tile_q, walk.num_kv_heads, walk.group, head_size)
    grouped = jnp.moveaxis(grouped, 0, 2).reshape(walk.num_kv_heads, walk.group * tile_q, head_size)
    grouped = grouped * walk.options.scale
    queries = first_position + jnp.arange(tile_q)
    end = first_position + live  # one past the last live query: no key at or after it exists
    last = (end + walk.tile - 1) // walk.tile
    first = walk.first_tile(first_position)
    window = walk.options.sliding_window
    seen_from = 0 if window is None else first_position - window + 1

    def body(index: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]):
        top, total, acc = carry
        blocks = jax.lax.dynamic_slice_in_dim(table, index * walk.blocks_per_tile, walk.blocks_per_tile)
        k, v = walk.gather(blocks)  # [K, tile, D]
        keys = index * walk.tile + jnp.arange(walk.tile)
        scores = walk.cap(walk.product("kqd,ksd->kqs", grouped, k))
        scores = scores.reshape(walk.num_kv_heads, walk.group, tile_q, walk.tile)
        mask = walk.visible(keys[None], queries[:, None])
        scores = jnp.where(mask, scores, MASKED)
        new_top = jnp.maximum(top, scores.max(-1))
        weights = jnp.where(mask, jnp.exp(scores - new_top[..., None]), 0.0)
        rescale = jnp.exp(top - new_top)
        v = jnp.where(((keys >= seen_from) & (keys < end))[:, None], v, 0.0)
        flat = weights.reshape(walk.num_kv_heads, walk.group * tile_q, walk.tile)
        added = walk.weigh("kqs,ksd->kqd", flat, v).reshape(acc.shape)
        return new_top, total * rescale + walk.row_sums(weights), acc * rescale[..., None] + added

    shape = (walk.num_kv_heads, walk.group, tile_q)
    init = jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros((*shape, walk.value_size))
    top, total, acc = jax.lax.fori_loop(first, last, body, init)
    return jnp.moveaxis(walk.finish(top, total, acc, (0, 1)), 2, 0).reshape(
        tile_q, num_heads, walk.value_size
    )
