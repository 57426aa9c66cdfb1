"""Causal attention of rows with several queries for Hopper (Mosaic GPU): prompts, chunks and mixed steps.

Central ideas:

* FlashAttention 3's shape: in each CTA (thread block) one warpgroup loads, two compute 64 rows of scores each, taking
  turns on the tensor cores while the other does its softmax.
* The query heads of a group share a tile, so 64 rows are a few tokens by ``group`` heads (row = head * tokens + token)
  and short rows of the batch waste little. Tiles are laid at the end of a row overlapping the one before (the same
  result is written twice) so that only rows shorter than a tile need care at their borders.
* One persistent grid over a list of tiles that ``plan_prefill`` makes on the device, longest first, dealt out in
  alternating direction. Keys are walked in steps at absolute positions, and a masked step changes nothing to the last
  bit, so a token's result depends neither on the tile nor on the chunk it was computed in.
* New keys and values are in the cache already (``kv_cache_update``).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ragged_paged_attention.gpu_launch import launch
from pallas_kernels.ragged_paged_attention.gpu_primitives import copy_layout, store, whole_lines
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.options import AttentionOptions

LOG2E = math.log2(math.e)
NOTHING_SEEN = -1e30
"""Running maximum before any key was seen: finite, so that a wholly masked step is the identity."""

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


def prefill_attention(
    q: jax.Array,
    kv_cache: Any,
    metadata: AttentionMetadata,
    plan: PrefillPlan,
    options: AttentionOptions,
    sinks: jax.Array | None,
    out: Any,
    *,
    num_sms: int,
    scales: jax.Array | None = None,
    interpret: Any = None,
) -> None:
    """Attend the tokens of rows that do not decode; zero those of padding.

    Args:
        q: [T, H, D], bfloat16 or float16.
        kv_cache: reference to [2, num_blocks, K, block_size, D], of q's type, float8 or int8, the new tokens written
            already.
        plan: of this batch.
        sinks: [H] extra logits of the denominator.
        out: reference to [T, H, D].
        scales: float32 [num_blocks, 2, K, block_size] of an int8 cache, the new tokens' written already.
    """  # fmt: skip
    from jax.experimental.pallas import mosaic_gpu as plgpu

    config = plan.config
    num_heads, head_size = q.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2], kv_cache.shape[3]
    group = num_heads // num_kv_heads
    shape = tile_shape(group)
    if q.shape[0] < shape.tokens_per_cta:
        raise ValueError(f"prefill needs at least {shape.tokens_per_cta} (padded) tokens, got {q.shape[0]}")
    operands = [plan.tiles, plan.counts, metadata.block_tables, metadata.seq_lens, q]
    if sinks is not None:
        operands.append(_sinks_by_row(sinks.astype(jnp.float32) * LOG2E, num_kv_heads, group, shape))
    step, stages = config.step, config.stages
    copies = max(step // block_size, 1)
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    if scales is not None:
        operands.append(scales)
    # Tiles of small elements arrive in memory of their own, which the second query buffer leaves to them.
    widens = kv_cache.dtype != q.dtype
    query_buffers = config.query_buffers if head_size <= 128 and not widens else 1
    arriving = (2 if head_size <= 128 else 1) if widens else 0
    scratch = dict(
        q_s=plgpu.SMEM((query_buffers, CONSUMERS, ROWS, head_size), q.dtype, transforms=tiled),
        k_s=plgpu.SMEM((stages, step, head_size), q.dtype, transforms=tiled),
        v_s=plgpu.SMEM((stages, step, head_size), q.dtype, transforms=tiled),
        row_s=plgpu.SMEM((CONSUMERS, 16, head_size), q.dtype),
        k_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        v_edge=plgpu.Barrier(num_arrivals=copies),
        q_full=plgpu.Barrier(num_barriers=query_buffers),
        k_free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        v_free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        q_free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=query_buffers),
        turn=plgpu.Barrier(num_arrivals=CONSUMERS),
    )
    if widens:
        scratch["kv_in"] = plgpu.SMEM((arriving, step, head_size), kv_cache.dtype)
        arrivals = copies if scales is None else 2 * copies
        scratch["kv_arrived"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=arriving)
        if scales is not None:
            together = _scales_together(step, block_size)
            shape_in = arriving, step // together, whole_lines(together, jnp.float32)
            scratch["scales_in"] = plgpu.SMEM(shape_in, jnp.float32)
    if interpret is not None:  # which knows no product of registers with shared memory
        scratch["p_s"] = plgpu.SMEM((CONSUMERS, ROWS, step), q.dtype, transforms=tiled)
    case = (
        config, options, shape, group, head_size, block_size, query_buffers, sinks is not None, num_sms, arriving,
    )  # fmt: skip
    build = functools.partial(
        plgpu.kernel,
        _kernel_body(*case),
        grid=(num_sms,),
        grid_names=("cta",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=not config.auto_barriers
        ),
        kernel_name="paged_prefill",
        interpret=interpret,
    )
    operands.append(kv_cache[...])  # only read
    batched = [0, 2, 3, 4, len(operands)]
    launch(
        lambda out_type: build(out_type=out_type),
        ("paged_prefill", case),
        operands,
        [out],
        batched=batched,
        interpret=interpret,
    )


def _scales_together(step: int, block_size: int) -> int:
    """Tokens whose scales arrive in one piece, or in pieces that may lie side by side."""
    one_block = min(block_size, step)
    return step if whole_lines(one_block, jnp.float32) == one_block else one_block


def _sinks_by_row(sinks: jax.Array, num_kv_heads: int, group: int, shape: TileShape) -> jax.Array:
    """[K, consumers, ROWS]: the sink of the query head that each row of a tile belongs to."""
    sinks = sinks.reshape(num_kv_heads, group)
    row = jnp.arange(ROWS) // shape.tokens
    consumer = jnp.arange(CONSUMERS)[:, None]
    head = row[None] if shape.splits_tokens else consumer * shape.heads + row[None]
    head = jnp.broadcast_to(jnp.minimum(head, group - 1), (CONSUMERS, ROWS))
    return sinks[:, head]


def _kernel_body(
    config: PrefillConfig, options: AttentionOptions, shape: TileShape, group: int, head_size: int, block_size: int,
    query_buffers: int, has_sinks: bool, num_ctas: int, arriving: int,
):  # fmt: skip
    from jax.experimental.pallas import mosaic_gpu as plgpu

    step_size, stages, window = config.step, config.stages, options.sliding_window
    row_layout = plgpu.Layout.WGMMA.reduce(1)
    scale = options.scale * LOG2E if options.soft_cap is None else 1.0

    def per_row(value):
        return plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), row_layout)

    def over_columns(x, columns):
        return lax.broadcast_in_dim(x, (ROWS, columns), [0])

    def paged_prefill(
        tiles, counts, tables, lengths, q, *refs,
        q_s, k_s, v_s, row_s, k_full, v_full, v_edge, q_full, k_free, v_free, q_free, turn, p_s=None,
        kv_in=None, kv_arrived=None, scales_in=None,
    ):  # fmt: skip
        sinks, refs = (refs[0], refs[1:]) if has_sinks else (None, refs)
        scales, (cache, out) = (None, refs) if scales_in is None else (refs[0], refs[1:])
        num_kv_heads, table_width = cache.shape[2], tables.shape[1]
        num_tokens = counts[2]
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        num_items = counts[0] * num_kv_heads
        rounds, rest = lax.div(num_items, num_ctas), lax.rem(num_items, num_ctas)
        in_last = jnp.where(lax.rem(rounds, 2) == 0, cta, num_ctas - 1 - cta) < rest
        num_own = rounds + in_last.astype(jnp.int32)

        def item(i):
            """Tile and KV head of this CTA's i-th item: dealt out forwards, then backwards."""
            place = jnp.where(lax.rem(i, 2) == 0, cta, num_ctas - 1 - cta)
            index = i * num_ctas + place
            return lax.div(index, num_kv_heads), lax.rem(index, num_kv_heads)

        def tile_rows(tile, kv_head, consumer):
            """For each query head of a warpgroup's tile: its place in the tile, its tokens and its index."""
            first = tiles[tile, 1]
            if shape.splits_tokens:
                first = first + consumer * shape.tokens
            for j in range(shape.heads):
                head = j if shape.splits_tokens else consumer * shape.heads + j
                yield pl.ds(j * shape.tokens, shape.tokens), first, kv_head * group + head, head

        per_step = max(step_size // block_size, 1)

        def block_ids(row, step):
            at = lax.div(step * step_size, block_size)
            return [tables[row, jnp.minimum(at + i, table_width - 1)] for i in range(per_step)]

        def load(half, buffer, full, slot, blocks, kv_head, step):
            if block_size >= step_size:
                at = lax.rem(step * step_size, block_size)
                inside = pl.ds(pl.multiple_of(at, step_size), step_size)
                plgpu.copy_gmem_to_smem(cache.at[half, blocks[0], kv_head, inside], buffer.at[slot], full)
                return
            for i, block in enumerate(blocks):
                target = buffer.at[slot, pl.ds(i * block_size, block_size)]
                plgpu.copy_gmem_to_smem(cache.at[half, block, kv_head], target, full)

        together = _scales_together(step_size, block_size)

        def scales_at(place, token, count):
            """Where the scales of ``count`` tokens lie, of which the first is the step's ``token``-th."""
            return scales_in.at[place, token // together, pl.ds(token % together, count)]

        def load_scales(half, place, blocks, kv_head, step):
            if block_size >= step_size:
                at = lax.rem(step * step_size, block_size)
                ours = scales.at[blocks[0], half, kv_head, pl.ds(pl.multiple_of(at, step_size), step_size)]
                plgpu.copy_gmem_to_smem(ours, scales_at(place, 0, step_size), kv_arrived.at[place])
                return
            for i, block in enumerate(blocks):
                target = scales_at(place, i * block_size, block_size)
                plgpu.copy_gmem_to_smem(scales.at[block, half, kv_head], target, kv_arrived.at[place])

        def load_narrow(number, row, first, end, kv_head):
            """Start loading a small tile: keys and values of the steps from ``first`` to ``end``, in turn."""
            step, half = first + lax.div(number, 2), lax.rem(number, 2)
            place = lax.rem(number, arriving)

            @pl.when(step < end)
            def _load():
                blocks = block_ids(row, step)
                for which in range(2):

                    @pl.when(half == which)
                    def _half(which=which):
                        load(which, kv_in, kv_arrived.at[place], place, blocks, kv_head, step)
                        if scales is not None:
                            load_scales(which, place, blocks, kv_head, step)

        def widen(number, target):
            """Wait for a tile of small elements and bring it where the products want it, in their type."""
            place = lax.rem(number, arriving)
            plgpu.barrier_wait(kv_arrived.at[place])
            rows = 64 if scales is None else min(together, 64)
            layout = copy_layout(rows, 64)

            def piece(begin, scale):
                if scales is not None:
                    scale = plgpu.load(scale, layout=layout.reduce(1), optimized=False)
                    scale = lax.broadcast_in_dim(scale, (rows, 64), [0])
                for column in range(0, head_size, 64):
                    part = pl.ds(begin, rows), pl.ds(column, 64)
                    value = plgpu.load(kv_in.at[place, *part], layout=layout, optimized=False)
                    value = value.astype(jnp.float32)
                    target[part] = (value if scale is None else value * scale).astype(q.dtype)

            def block(i, _):
                piece(pl.multiple_of(i * rows, rows), scales_in.at[place, i, pl.ds(0, rows)])

            if rows < 64:
                lax.fori_loop(0, step_size // rows, block, None)
            else:
                for begin in range(0, step_size, rows):
                    piece(begin, None if scales is None else scales_at(place, begin, rows))
            plgpu.commit_smem()

        def arrive(full):
            for _ in range(per_step):  # the arrivals which the copies would make
                plgpu.barrier_arrive(full)

        def load_queries(i):
            """Bring the i-th item's queries in, by way of registers: their tokens begin anywhere, and the copy engine
            writes swizzled tiles only from rows that are multiples of 8."""
            tile, kv_head = item(i)
            buffer = lax.rem(i, query_buffers)
            pl.when(i >= query_buffers)(lambda: plgpu.barrier_wait(q_free.at[buffer]))
            layout = copy_layout(shape.tokens, head_size)
            for consumer in range(CONSUMERS):
                loaded = []  # all of them before the first is stored: one round trip to memory
                for rows, first, head, index in tile_rows(tile, kv_head, consumer):
                    if isinstance(index, int) and index >= group:
                        continue
                    source = q.at[pl.ds(first, shape.tokens), head]
                    loaded.append((rows, plgpu.load(source, layout=layout, optimized=False)))
                for rows, value in loaded:
                    q_s[buffer, consumer, rows] = value
            plgpu.commit_smem()
            plgpu.barrier_arrive(q_full.at[buffer])

        def zero_padding():
            lines = row_s.at[warpgroup]
            store(lines, jnp.zeros(lines.shape, q.dtype))
            plgpu.commit_smem()
            live = counts[1]
            me = cta * CONSUMERS + warpgroup
            workers = num_ctas * CONSUMERS

            def one_token(i, _):
                for kv_head in range(num_kv_heads):
                    target = out.at[live + me + i * workers, pl.ds(kv_head * group, group)]
                    plgpu.copy_smem_to_gmem(row_s.at[warpgroup, pl.ds(0, group)], target)

            lax.fori_loop(0, pl.cdiv(jnp.maximum(num_tokens - live - me, 0), workers), one_token, None)
            plgpu.wait_smem_to_gmem(0)

        def zero_unseen_values(slot, first, oldest, length):
            """What lies outside the row's visible context may hold anything, and 0 * NaN is NaN."""
            at = plgpu.broadcasted_iota(jnp.int32, (64, 64), 0, layout=plgpu.Layout.WGMMA) + first
            for begin in range(0, step_size, 64):
                seen = at + begin < length
                if window is not None:
                    seen &= at + begin >= oldest
                for column in range(0, head_size, 64):
                    part = v_s.at[slot, pl.ds(begin, 64), pl.ds(column, 64)]
                    old = plgpu.load(part, layout=plgpu.Layout.WGMMA)
                    part[...] = jnp.where(seen, old, jnp.zeros_like(old))
            plgpu.commit_smem()

        @pl.when(warpgroup == CONSUMERS)
        def _producer():
            plgpu.set_max_registers(config.producer_registers, action="decrease")

            ahead = query_buffers > 1
            if ahead:
                pl.when(num_own > 0)(lambda: load_queries(jnp.int32(0)))

            def one_item(i, done):
                if not ahead:
                    load_queries(i)
                tile, kv_head = item(i)
                row, begin, end = tiles[tile, 0], tiles[tile, 5], tiles[tile, 7]
                length = lengths[row]
                # What the tile's first token of this row sees; tokens before it are other rows', and dropped.
                oldest = 0 if window is None else tiles[tile, 4] + tiles[tile, 2] - window + 1
                # By the third step's load the item before is done with, hence the other query buffer is free.
                queries_at = jnp.where(i + 1 < num_own, jnp.minimum(begin + 2, end - 1), -1)

                def unseen_in(step):
                    unseen = (step + 1) * step_size > length
                    return unseen if window is None else unseen | (step * step_size < oldest)

                def one_narrow_step(step, _):
                    count = done + step - begin
                    slot = lax.rem(count, stages)
                    for half, tile_s, free, full in ((0, k_s, k_free, k_full), (1, v_s, v_free, v_full)):
                        number = 2 * (step - begin) + half
                        pl.when(count >= stages)(lambda free=free: plgpu.barrier_wait(free.at[slot]))
                        widen(number, tile_s.at[slot])
                        load_narrow(number + arriving, row, begin, end, kv_head)
                        if half:
                            pl.when(unseen_in(step))(
                                lambda: zero_unseen_values(slot, step * step_size, oldest, length)
                            )
                        arrive(full.at[slot])

                def one_step(step, _):
                    count = done + step - begin
                    slot = lax.rem(count, stages)
                    blocks = block_ids(row, step)
                    pl.when(count >= stages)(lambda: plgpu.barrier_wait(k_free.at[slot]))
                    load(0, k_s, k_full.at[slot], slot, blocks, kv_head, step)
                    pl.when(count >= stages)(lambda: plgpu.barrier_wait(v_free.at[slot]))
                    unseen = unseen_in(step)

                    @pl.when(jnp.logical_not(unseen))
                    def _values():
                        load(1, v_s, v_full.at[slot], slot, blocks, kv_head, step)

                    @pl.when(unseen)
                    def _some_values():
                        load(1, v_s, v_edge, slot, blocks, kv_head, step)
                        plgpu.barrier_wait(v_edge)
                        zero_unseen_values(slot, step * step_size, oldest, length)
                        arrive(v_full.at[slot])

                    if ahead:
                        pl.when(step == queries_at)(lambda: load_queries(i + 1))

                if arriving:
                    for number in range(arriving):
                        load_narrow(jnp.int32(number), row, begin, end, kv_head)
                lax.fori_loop(begin, end, one_narrow_step if arriving else one_step, None)
                return done + end - begin

            done = lax.fori_loop(0, num_own, one_item, jnp.int32(0))
            for slot in range(stages):
                for barrier in (k_free, v_free):
                    pl.when(done > slot)(
                        lambda barrier=barrier, slot=slot: plgpu.barrier_wait(barrier.at[slot])
                    )
            for buffer in range(query_buffers):
                pl.when(num_own > buffer)(lambda buffer=buffer: plgpu.barrier_wait(q_free.at[buffer]))

        @pl.when(warpgroup < CONSUMERS)
        def _consumer():
            plgpu.set_max_registers(config.consumer_registers, action="increase")

            def take_turn():
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

            def store_tile(tile, kv_head, buffer, result):
                """Write a tile's result, by way of the memory its queries were in."""
                mine = q_s.at[buffer, warpgroup]
                mine[...] = result.astype(q.dtype)
                plgpu.commit_smem()
                begin, end = tiles[tile, 2], tiles[tile, 3]
                whole = (begin == 0) & (end == shape.tokens_per_cta)
                if shape.splits_tokens:
                    begin, end = begin - warpgroup * shape.tokens, end - warpgroup * shape.tokens
                for rows, first, head, index in tile_rows(tile, kv_head, warpgroup):

                    def store_whole(rows=rows, first=first, head=head):
                        value = plgpu.load(mine.at[rows], layout=copy_layout(shape.tokens, head_size))
                        store(out.at[pl.ds(first, shape.tokens), head], value)

                    def store_some(rows=rows, first=first, head=head):
                        store_rows(mine.at[rows], out, first, head, begin, end)

                    exists = whole if isinstance(index, int) else whole & (index < group)
                    pl.when(exists)(store_whole)
                    partial = jnp.logical_not(whole)
                    pl.when(partial if isinstance(index, int) else partial & (index < group))(store_some)
                plgpu.commit_smem()

            def store_rows(source, out, first, head, begin, end):
                """Write rows begin to end (clamped) of one head, one by one."""
                piece = min(shape.tokens, 16)
                lines = row_s.at[warpgroup, pl.ds(0, piece)]
                for base in range(0, shape.tokens, piece):
                    value = plgpu.load(source.at[pl.ds(base, piece)], layout=copy_layout(piece, head_size))
                    store(lines, value)
                    plgpu.commit_smem()

                    def one_row(i, _, base=base):
                        row = pl.ds(first + base + i, 1)
                        plgpu.copy_smem_to_gmem(row_s.at[warpgroup, pl.ds(i, 1)], out.at[row, head])

                    low, high = jnp.maximum(begin - base, 0), jnp.minimum(end - base, piece)
                    lax.fori_loop(low, high, one_row, None)
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

            def add_values(acc, weights, values, meanwhile):
                """acc + weights @ values, with ``meanwhile`` done before the product is waited for."""

                def multiply(acc_ref, weights):
                    plgpu.wgmma(acc_ref, weights, values)
                    meanwhile()

                if p_s is None:
                    return pl.run_state(lambda acc_ref: multiply(acc_ref, weights))(plgpu.ACC.init(acc))
                p_s[warpgroup] = weights
                plgpu.commit_smem()

                def product(acc_ref):
                    multiply(acc_ref, p_s.at[warpgroup])
                    return acc_ref[...]

                return acc + pl.run_scoped(product, plgpu.ACC(acc.shape, jnp.float32))

            # The second warpgroup is half a step behind, across items where the next queries have their own buffer;
            # with one buffer it must be let finish before anyone can have the next queries.
            in_step_at_ends = query_buffers == 1
            if not in_step_at_ends:
                pl.when(warpgroup == 1)(take_turn)

            def steps_of(i):
                """Of the i-th item, if there is one: its position and steps."""
                tile = jnp.minimum(item(i)[0], jnp.maximum(counts[0] - 1, 0))
                return tuple(tiles[tile, n] for n in (4, 5, 6, 7))

            def one_item(i, carry):
                done, (position, begin, unmasked_end, end) = carry
                following = steps_of(i + 1)  # now, so that nobody waits for them
                tile, kv_head = item(i)
                buffer = lax.rem(i, query_buffers)
                my_position = position + (warpgroup * shape.tokens if shape.splits_tokens else 0)
                top, total = per_row(NOTHING_SEEN), per_row(0.0)
                if sinks is not None:
                    top = plgpu.load(sinks.at[kv_head, warpgroup], layout=row_layout, optimized=False)
                    total = per_row(1.0)
                acc = plgpu.layout_cast(jnp.full((ROWS, head_size), 0.0, jnp.float32), plgpu.Layout.WGMMA)
                if in_step_at_ends:
                    pl.when(warpgroup == 1)(take_turn)
                plgpu.barrier_wait(q_full.at[buffer])
                plgpu.barrier_wait(k_full.at[lax.rem(done, stages)])

                def one_step(step, carry, *, masked):
                    acc, top, total = carry
                    count = done + step - begin
                    slot = lax.rem(count, stages)

                    def scores(acc_ref):
                        plgpu.wgmma(acc_ref, q_s.at[buffer, warpgroup], k_s.at[slot].T)
                        take_turn()
                        return acc_ref[...]

                    s = pl.run_scoped(scores, plgpu.ACC((ROWS, step_size), jnp.float32))
                    plgpu.barrier_arrive(k_free.at[slot])
                    if options.soft_cap is not None:
                        s = jnp.tanh(s * (options.scale / options.soft_cap)) * (options.soft_cap * LOG2E)
                    if masked:
                        token = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA)
                        at = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
                        ahead = (
                            token & (shape.tokens - 1)
                        ) - at  # query minus key, both from the tile's corner
                        corner = step * step_size - my_position
                        visible = ahead >= corner
                        if window is not None:
                            visible &= ahead < corner + window
                        s = jnp.where(visible, s, -jnp.inf)
                    new_top = jnp.maximum(top, s.max(axis=1) * scale)
                    shrink = jnp.exp2(top - new_top)
                    p = jnp.exp2(s * scale - over_columns(new_top, step_size))
                    acc *= over_columns(shrink, head_size)
                    total *= shrink
                    p16 = p.astype(q.dtype)

                    def end_softmax():
                        plgpu.barrier_arrive(turn)
                        plgpu.barrier_wait(v_full.at[slot])
                        plgpu.barrier_wait(turn)

                    if head_size <= 128:
                        total += p.sum(axis=1)
                        acc, total, new_top, p16 = lax.optimization_barrier((acc, total, new_top, p16))
                        end_softmax()
                    else:
                        end_softmax()
                        total += p.sum(axis=1)

                    def await_next_keys():
                        next_slot = lax.rem(count + 1, stages)
                        pl.when(step + 1 < end)(lambda: plgpu.barrier_wait(k_full.at[next_slot]))

                    acc = add_values(acc, p16, v_s.at[slot], await_next_keys)
                    plgpu.barrier_arrive(v_free.at[slot])
                    return acc, new_top, total

                carry = acc, top, total
                if window is None:
                    carry = lax.fori_loop(
                        begin, unmasked_end, lambda s, c: one_step(s, c, masked=False), carry
                    )
                acc, _, total = lax.fori_loop(
                    unmasked_end, end, lambda s, c: one_step(s, c, masked=True), carry
                )
                if in_step_at_ends:
                    pl.when(warpgroup == 0)(take_turn)
                store_tile(tile, kv_head, buffer, acc * over_columns(1.0 / total, head_size))
                plgpu.barrier_arrive(q_free.at[buffer])
                return done + end - begin, following

            lax.fori_loop(0, num_own, one_item, (jnp.int32(0), steps_of(jnp.int32(0))))
            if not in_step_at_ends:
                pl.when(warpgroup == 0)(take_turn)
            zero_padding()

    return paged_prefill
