"""How the decoding rows' work is cut into one stretch per group of CTAs: configuration, plan, and its making.

``gpu_decode`` says the ideas behind it. Everything here runs once a step, on the device.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata


@dataclass(frozen=True)
class DecodeConfig:
    """What is tuned.

    Args:
        step: keys per step, a multiple of 64.
        stages: steps in flight in one CTA.
        ctas_per_sm: CTAs (thread blocks) that share a multiprocessor, bounded by shared memory and registers.
        min_chunk: smallest chunk, in steps.
        max_chunks: most chunks of a sequence, a power of two; longer rows get larger chunks.
        merge: chunks that are loaded at a time when a sequence is merged, for 8 heads of 128; bounded by registers.
        halves: merge with all threads where half of the columns are padding.
        separate: wait for a step's values only when its scores are done.
        auto_barriers: leave barriers to the compiler, which puts two around every store and one before every copy.
    """

    step: int = 64
    stages: int = 2
    ctas_per_sm: int = 3
    min_chunk: int = 4
    max_chunks: int = 32
    merge: int = 6
    halves: bool = True
    separate: bool = True
    auto_barriers: bool = False


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodePlan:
    """The stretches of one step's batch: the same for every layer with the same window.

    Args:
        rows: [R, 4] int32: length, first step, one past the last step, steps per chunk.
        stretches: [groups, ...] int32, see ``Stretch``; what a CTA needs to start, in one place.
        counters: [groups * K] int32, or a reference to it: steps done of the sequence that begins in one CTA and
            ends in another. Zero before and after every call.
        config: by which it was cut.
    """

    rows: jax.Array
    stretches: jax.Array
    counters: Any
    config: DecodeConfig = field(metadata=dict(static=True))


class Stretch(enum.IntEnum):
    """Columns of a stretch. A sequence is a row's context under one KV head."""

    ROW = 0
    STEP = 1
    """Where it begins."""
    COUNT = 2
    """Its number of steps."""
    BEGINS_IN = 3
    """The group in which its first sequence begins."""
    LAST_STOP = 4
    """One past the step at which its last sequence is left."""
    DECODE_ROWS = 5
    LIVE_ROWS = 6
    ROWS = 7
    """R: a kernel serves every batch size, and does not know it."""
    FIRST_ROW = 8
    """Four columns: its first row's entry of ``rows``."""
    EARLY = 12
    """The ``stages`` steps that are loaded before anything else and the one after them, if any: of each its row, its
    number, its row's length, one past its row's last step, and ``blocks_per_step`` block ids."""


def columns_of(group: int) -> int:
    """Columns of the scores: a group's query heads, padded as the instruction wants."""
    return 8 * pl.cdiv(group, 8)


def blocks_per_step(step: int, block_size: int) -> int:
    """KV blocks, or parts of one, in a step."""
    return max(step // block_size, 1)


def plan_decode(
    metadata: AttentionMetadata, *, num_kv_heads: int, block_size: int | None, sliding_window: int | None,
    num_sms: int, config: DecodeConfig,
) -> DecodePlan:  # fmt: skip
    """Cut the decoding rows' work into one stretch per group of CTAs, on the device.

    Args:
        block_size: of the cache; None leaves the first steps' places out of the stretches, which costs the kernel
            round trips to memory as it starts.
    """
    num_rows, width = metadata.block_tables.shape
    num_groups = max(num_sms * config.ctas_per_sm // num_kv_heads, 1)
    decode_rows, live_rows = metadata.distribution[0], metadata.distribution[2]
    length = jnp.where(jnp.arange(num_rows) < decode_rows, metadata.seq_lens, 0)
    first = jnp.zeros_like(length)
    if sliding_window is not None:
        first = jnp.maximum(length - sliding_window, 0) // config.step
    last = pl.cdiv(length, config.step)
    steps = last - first
    chunk = jnp.maximum(config.min_chunk, _next_power_of_two(pl.cdiv(steps, config.max_chunks)))
    rows = jnp.stack([length, first, last, chunk], -1)
    ends = jnp.cumsum(steps, dtype=jnp.int32)
    total = ends[-1]

    def locate(at):
        """Row and step (from the row's first) of a place on the line."""
        row = jnp.searchsorted(ends, at, side="right", method="compare_all").astype(jnp.int32)
        row = jnp.minimum(row, num_rows - 1)
        return row, at - (ends[row] - steps[row])

    # With little to do, no more groups than chunks, or one CTA per multiprocessor: the first are on different ones.
    sharing = jnp.clip(
        jnp.sum(pl.cdiv(steps, chunk)), min(max(num_sms // num_kv_heads, 1), num_groups), num_groups
    )
    index = jnp.minimum(jnp.arange(num_groups + 1, dtype=jnp.int32), sharing)
    border = (total // sharing) * index + (total % sharing) * index // sharing
    row, step = locate(border)
    begin = first[row] + step
    rounded = jnp.minimum(pl.cdiv(begin, chunk[row]) * chunk[row], last[row])
    border = jnp.where((step == 0) | (border >= total), border, border + rounded - begin)
    row, step = locate(border)
    begins_in = jnp.searchsorted(border[:-1], border - step, side="right", method="compare_all") - 1
    last_row, last_step = locate(jnp.maximum(border[1:] - 1, 0))
    row, step, begins_in = row[:-1], step[:-1], begins_in[:-1]
    fields = (
        row, first[row] + step, border[1:] - border[:-1], begins_in, first[last_row] + last_step + 1,
        jnp.full_like(row, decode_rows), jnp.full_like(row, live_rows), jnp.full_like(row, num_rows),
    )  # fmt: skip
    stretches = jnp.concatenate([jnp.stack(fields, -1), rows[row]], axis=1)
    if block_size is not None:
        at_row, at_step = locate(border[:-1, None] + jnp.arange(config.stages + 1, dtype=jnp.int32))
        at_step += first[at_row]
        at = at_step[..., None] * config.step
        at = at + jnp.arange(blocks_per_step(config.step, block_size)) * block_size
        blocks = metadata.block_tables[at_row[..., None], jnp.minimum(at // block_size, width - 1)]
        early = jnp.stack([at_row, at_step, length[at_row], last[at_row]], -1)
        early = jnp.concatenate([early, blocks], axis=-1)
        stretches = jnp.concatenate([stretches, early.reshape(num_groups, -1)], axis=1)
    return DecodePlan(
        rows=rows,
        stretches=stretches.astype(jnp.int32),
        counters=jnp.zeros(num_groups * num_kv_heads, jnp.int32),
        config=config,
    )


def _next_power_of_two(x: jax.Array) -> jax.Array:
    return jnp.int32(1) << (32 - lax.clz(jnp.maximum(x, 1) - 1))
