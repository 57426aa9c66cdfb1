"""Work lists of the TPU attention kernel: which tiles of queries there are, computed on the device by XLA.

They depend on the batch alone, so that in a model XLA computes them once for all layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata

ROW, TOKEN, COUNT, POSITION = range(4)
"""Fields of an item: its row, its first token, its live tokens, the position of the first one."""


def decode_items(metadata: AttentionMetadata, first_row: int, num_rows: int) -> jax.Array:
    """One item a decoding row among ``num_rows`` rows from ``first_row``."""
    return _items(metadata, first_row, num_rows, 1, num_rows, decoding=True)


def tile_items(
    metadata: AttentionMetadata, first_row: int, num_rows: int, tile: int, num_tokens: int
) -> jax.Array:
    """One item for each ``tile`` queries of the other live rows among these; no room for any in a decode-only step."""
    if metadata.decode_only:
        return jnp.zeros(1, jnp.int32)
    most = min(num_tokens, num_tokens // tile + num_rows)
    return _items(metadata, first_row, num_rows, tile, most, decoding=False)


def num_items(items: jax.Array) -> int:
    """Items a list has room for."""
    return (items.shape[0] - 1) // 4


def _items(
    metadata: AttentionMetadata, first_row: int, num_rows: int, tile: int, most: int, *, decoding: bool
) -> jax.Array:
    """int32 [1 + 4 * most]: the number of items, then each field of all of them; rows without tokens have none."""
    starts, ends = metadata.query_start_loc[:-1], metadata.query_start_loc[1:]
    rows = jnp.arange(starts.shape[0], dtype=jnp.int32)
    decode, _, live = metadata.distribution
    wanted = rows < decode if decoding else (rows >= decode) & (rows < live)
    wanted &= (rows >= first_row) & (rows < first_row + num_rows)
    tiles = jnp.where(wanted, (ends - starts + tile - 1) // tile, 0)
    tile_ends = jnp.cumsum(tiles, dtype=jnp.int32)
    index = jnp.arange(most, dtype=jnp.int32)
    row = jnp.sum(index[:, None] >= tile_ends[None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, starts.shape[0] - 1)
    offset = (index - (tile_ends[row] - tiles[row])) * tile
    count = jnp.clip(ends[row] - starts[row] - offset, 0, tile)
    position = metadata.seq_lens[row] - (ends[row] - starts[row]) + offset
    fields = (row - first_row, starts[row] + offset, count, position)
    return jnp.concatenate([tile_ends[-1:], *fields]).astype(jnp.int32)
