"""The Hopper kernel's work list: tiles of rows of one group each, computed on the device by XLA.

Tiles begin at multiples of 8 rows, as the copy engine wants, so that their first and last rows may be other groups'.
A group is cut into equal tiles, as few as can be, for equal work. Padding is one more group, whose tiles are zeros.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

ALIGNED = 8
"""Rows."""


class Item(enum.IntEnum):
    """Columns of an item."""

    GROUP = 0
    """E where it is padding."""
    FIRST = 1
    """First row that is loaded."""
    BEGIN = 2
    """The group's rows in the tile: the first, and one past the last, counted from ``FIRST``."""
    END = 3
    WIDTH = 4
    """Which of the widths the tile has."""
    FIELDS = 8


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WorkList:
    """int32 [I, 8] items, and int32 [4] how many of them are live (and padding)."""

    items: jax.Array
    count: jax.Array


def padded_rows(num_rows: int, widths: Sequence[int]) -> int:
    """Rows that the operands need, so that a tile of any width in use lies inside: a multiple of 8."""
    enough = next((width for width in widths if width >= num_rows), widths[-1])
    return max(-(-num_rows // ALIGNED) * ALIGNED, enough)


def list_tiles(group_sizes: jax.Array, num_rows: int, widths: Sequence[int]) -> WorkList:
    """The tiles of ``num_rows`` rows, which ``padded_rows`` gave.

    Args:
        group_sizes: int32 [E].
        num_rows: with padding.
        widths: of tiles, ascending multiples of 8.
    """
    num_groups, most = group_sizes.shape[0], widths[-1]
    sizes = jnp.append(group_sizes, num_rows - jnp.sum(group_sizes)).astype(jnp.int32)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = ends - sizes
    aligned = starts // ALIGNED * ALIGNED
    span = jnp.where(sizes > 0, ends - aligned, 0)
    tiles = -(-span // most)
    per = -(-span // jnp.maximum(tiles, 1))
    per = -(-per // ALIGNED) * ALIGNED
    last_tile = jnp.cumsum(tiles, dtype=jnp.int32)
    item = jnp.arange(_most_items(num_rows, num_groups, most), dtype=jnp.int32)
    group = jnp.sum(item[:, None] >= last_tile[None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, num_groups)
    begin = aligned[group] + (item - (last_tile[group] - tiles[group])) * per[group]
    end = jnp.minimum(begin + per[group], ends[group])
    which = jnp.sum(jnp.asarray(widths) < per[group][:, None], axis=1, dtype=jnp.int32)
    which = jnp.minimum(which, len(widths) - 1)
    # The tile is loaded whole: where the rows would end inside it, it begins earlier.
    first = jnp.minimum(begin, num_rows - jnp.asarray(widths, jnp.int32)[which])
    begin = jnp.maximum(begin, starts[group])
    fields = [group, first, begin - first, end - first, which]
    fields += [jnp.zeros_like(item)] * (Item.FIELDS - len(fields))
    count = jnp.stack([last_tile[-1], *[jnp.int32(0)] * 3])
    return WorkList(jnp.stack(fields, -1).astype(jnp.int32), count)


def _most_items(num_rows: int, num_groups: int, most: int) -> int:
    """Each group in use ends with a tile that need not be full, and begins up to 7 rows early."""
    used = min(num_groups + 1, num_rows)
    return used + (num_rows + (ALIGNED - 1) * used) // most
