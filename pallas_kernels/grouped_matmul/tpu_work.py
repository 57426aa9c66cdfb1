"""The TPU kernel's work list: which group meets which tile of rows, computed on the device by XLA.

Tiles are aligned, so a tile that several groups share is visited once for each of them, one after the other. Groups
without rows have no items: their weights are not read. Tiles of padding alone have one, which zeroes them.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowTiles:
    """Items in the order of their rows; what lies beyond ``count`` repeats the last one.

    Args:
        count: int32 [] live items, at least 1.
        group: int32 [I] whose matrix it takes.
        tile: int32 [I] tile of rows.
        begin, end: int32 [I] the group's rows, counted from the first of all; equal for a tile of padding.
    """

    count: jax.Array
    group: jax.Array
    tile: jax.Array
    begin: jax.Array
    end: jax.Array


def row_tiles(group_sizes: jax.Array, num_rows: int, tile_rows: int) -> RowTiles:
    """The items of ``num_rows`` rows, a multiple of ``tile_rows``."""
    num_groups, num_tiles = group_sizes.shape[0], num_rows // tile_rows
    sizes = jnp.append(group_sizes, 0).astype(jnp.int32)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    begins = ends - sizes
    first = begins // tile_rows
    visits = jnp.where(sizes > 0, (ends + tile_rows - 1) // tile_rows - first, 0)
    # Whole tiles of padding are those of a last group, which has no rows.
    first = first.at[-1].set((ends[-1] + tile_rows - 1) // tile_rows)
    visits = visits.at[-1].set(num_tiles - first[-1])
    last_visit = jnp.cumsum(visits, dtype=jnp.int32)
    count = last_visit[-1]
    item = jnp.minimum(jnp.arange(num_tiles + num_groups, dtype=jnp.int32), count - 1)
    group = jnp.sum(item[:, None] >= last_visit[None], axis=1, dtype=jnp.int32)
    tile = first[group] + item - (last_visit[group] - visits[group])
    return RowTiles(count, jnp.minimum(group, num_groups - 1), tile, begins[group], ends[group])
