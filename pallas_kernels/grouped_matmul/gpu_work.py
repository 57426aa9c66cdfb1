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
    """int32 [I, 8] items, and int32 [E + 1] how many of them the groups up to each have: the last one is all."""

    items: jax.Array
    up_to: jax.Array


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
    # Sums over a triangle and fields computed anew after the gather: four kernels of XLA's, where running sums are ten.
    number = jnp.arange(num_groups + 1, dtype=jnp.int32)
    before = jnp.where(number[:num_groups] < number[:, None], group_sizes, 0)
    up_to = jnp.where(number[:num_groups] <= number[:, None], group_sizes, 0)
    starts = jnp.sum(before, axis=1, dtype=jnp.int32)
    ends = jnp.sum(up_to, axis=1, dtype=jnp.int32)
    ends = jnp.where(number < num_groups, ends, num_rows)
    tiles = _cut(starts, ends, most)[1]
    last_tile = jnp.sum(jnp.where(number <= number[:, None], tiles, 0), axis=1, dtype=jnp.int32)
    item = jnp.arange(_most_items(num_rows, num_groups, most), dtype=jnp.int32)
    group = jnp.sum(item[:, None] >= last_tile[None], axis=1, dtype=jnp.int32)
    group = jnp.minimum(group, num_groups)
    start, end = starts[group], ends[group]
    aligned, tiles, per = _cut(start, end, most)
    begin = aligned + (item - (last_tile[group] - tiles)) * per
    end = jnp.minimum(begin + per, end)
    which = sum((per > width).astype(jnp.int32) for width in widths[:-1]) + jnp.zeros_like(item)
    width = sum((which == i) * width for i, width in enumerate(widths))
    # The tile is loaded whole: where the rows would end inside it, it begins earlier.
    first = jnp.minimum(begin, num_rows - width)
    begin = jnp.maximum(begin, start)
    fields = [group, first, begin - first, end - first, which]
    fields += [jnp.zeros_like(item)] * (Item.FIELDS - len(fields))
    return WorkList(jnp.stack(fields, -1).astype(jnp.int32), last_tile)


def _cut(starts: jax.Array, ends: jax.Array, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of groups' rows: where their tiles begin, how many there are, and the rows of each (the last one has fewer)."""
    aligned = starts // ALIGNED * ALIGNED
    span = jnp.where(ends > starts, ends - aligned, 0)
    tiles = -(-span // most)
    per = -(-span // jnp.maximum(tiles, 1))
    return aligned, tiles, -(-per // ALIGNED) * ALIGNED


def _most_items(num_rows: int, num_groups: int, most: int) -> int:
    """Each group in use ends with a tile that need not be full, and begins up to 7 rows early."""
    used = min(num_groups + 1, num_rows)
    return used + (num_rows + (ALIGNED - 1) * used) // most
