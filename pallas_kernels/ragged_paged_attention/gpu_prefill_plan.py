"""How the tokens of rows that do not decode are cut into tiles: configuration, shape of a tile, plan, and its making.

``gpu_prefill`` says the ideas behind it. The plan is made once a step, on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata

ROWS = 64
"""Rows of scores per computing warpgroup, as the instruction wants."""

CONSUMERS = 2


@dataclass(frozen=True)
class PrefillConfig:
    """What is tuned.

    Args:
        step: keys per step, a multiple of 64.
        stages: steps in flight.
        consumer_registers, producer_registers: registers a thread of a computing and of the loading warpgroup gets.
        query_buffers: tiles of queries in shared memory: with two, the next ones are loaded ahead. Large heads and
            caches of small elements have room for one.
        auto_barriers: leave barriers to the compiler, which puts two around every store and one before every copy. The
            kernel has what it needs: warps read back only what they wrote themselves, or after ``commit_smem``.
    """

    step: int = 128
    stages: int = 2
    consumer_registers: int = 216
    producer_registers: int = 72
    query_buffers: int = 2
    auto_barriers: bool = False

    def __post_init__(self) -> None:
        # A CTA starts with 168 registers a thread, and a warpgroup that asks for more than are free waits for ever.
        if CONSUMERS * self.consumer_registers + self.producer_registers > 168 * (CONSUMERS + 1):
            raise ValueError(f"{self} gives out more registers than a CTA has")


@dataclass(frozen=True)
class TileShape:
    """How tokens and query heads share the rows of a tile.

    Args:
        tokens: tokens of one warpgroup's tile, a power of two and at least 8.
        heads: query heads of one warpgroup's tile.
        splits_tokens: the warpgroups take different tokens of the same heads, else different heads of the same tokens.
    """

    tokens: int
    heads: int
    splits_tokens: bool

    @property
    def tokens_per_cta(self) -> int:
        return self.tokens * (CONSUMERS if self.splits_tokens else 1)


def tile_shape(group: int) -> TileShape:
    """The tile for ``group`` query heads per KV head, 1 to 16."""
    if group > 8:
        return TileShape(tokens=8, heads=-(-group // CONSUMERS), splits_tokens=False)
    return TileShape(tokens=ROWS // group // 8 * 8, heads=group, splits_tokens=True)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillPlan:
    """The tiles of one step's batch: the same for every layer with the same window.

    Args:
        tiles: [tiles, 8] int32, longest first: row, first token (in T), first and one past the last token of the row
            in the tile, position of the first token (negative where the tile begins before its row), first step, end
            of the steps that need no mask, end of the steps.
        counts: [4] int32: live tiles, live tokens, T, 0.
        config: by which they were cut.
    """

    tiles: jax.Array
    counts: jax.Array
    config: PrefillConfig = field(metadata=dict(static=True))


def plan_prefill(
    metadata: AttentionMetadata,
    *,
    group: int,
    num_tokens: int,
    sliding_window: int | None,
    config: PrefillConfig,
) -> PrefillPlan:
    """List the tiles of the rows that do not decode, on the device."""
    num_rows = metadata.seq_lens.shape[0]
    size = tile_shape(group).tokens_per_cta
    row_index = jnp.arange(num_rows)
    decode_rows, live_rows = metadata.distribution[0], metadata.distribution[2]
    starts, length = metadata.query_start_loc, metadata.seq_lens
    new = jnp.where((row_index >= decode_rows) & (row_index < live_rows), starts[1:] - starts[:-1], 0)
    ends = jnp.cumsum(pl.cdiv(new, size), dtype=jnp.int32)
    max_tiles = num_tokens // size + num_rows
    tile = jnp.arange(max_tiles, dtype=jnp.int32)
    live = tile < ends[-1]
    row = jnp.minimum(jnp.searchsorted(ends, tile, side="right", method="compare_all"), num_rows - 1).astype(
        jnp.int32
    )
    new = new[row]
    offset = (tile - (ends[row] - pl.cdiv(new, size))) * size
    offset = jnp.minimum(offset, jnp.maximum(new - size, 0))
    first = starts[row] + offset
    # The tile is loaded whole: where the array would end inside it, it begins earlier, with tokens of other rows.
    shift = jnp.maximum(first + size - num_tokens, 0)
    position = length[row] - new + offset
    end = position + jnp.minimum(new - offset, size)
    begin_step = jnp.zeros_like(end)
    unmasked_end = (position + 1) // config.step
    if sliding_window is not None:
        begin_step = jnp.maximum(position - sliding_window + 1, 0) // config.step
        unmasked_end = begin_step
    end_step = pl.cdiv(end, config.step)
    fields = (
        row,
        first - shift,
        shift,
        shift + end - position,
        position - shift,
        begin_step,
        unmasked_end,
        end_step,
    )
    order = jnp.argsort(jnp.where(live, begin_step - end_step, 1), stable=True)
    counts = jnp.stack([ends[-1], starts[live_rows], jnp.int32(num_tokens), jnp.int32(0)])
    tiles = jnp.stack(fields, -1)[order].astype(jnp.int32)
    return PrefillPlan(tiles=tiles, counts=counts.astype(jnp.int32), config=config)
