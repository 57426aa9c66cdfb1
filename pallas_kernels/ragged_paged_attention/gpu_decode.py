"""Decode attention for Hopper (Mosaic GPU): rows with one query each, split over the context, cache write fused in.

Central ideas:

* One persistent grid. ``plan_decode`` lays the live work out as one line of steps (``STEP`` keys each): rows in
  order, in a row its KV heads in order, in a head its context in order. Every CTA (thread block) gets an equal stretch
  of the line, so one long row and many short rows both fill the chip, and padding rows have no steps.
* A sequence (one row and KV head) is cut into chunks at absolute positions; the chunk size follows the row's own
  length only. A chunk is reduced on its own (online softmax) and chunks are folded in order, in float32, whether one
  CTA did them all or many did: a row's result does not depend on the rest of the batch. Stretches end at chunk
  borders. A sequence that spans CTAs leaves its chunks in global memory, and the CTA that finishes last folds them.
* Scores are computed transposed, S^T = K Q^T and O^T = V^T P^T, so that the keys fill the 64 rows which the
  instruction wants and the query heads of a group, padded to 8, are its columns: each key and value is read once.
* The new token's key and value are patched into the loaded tile and copied to their cache slot by the only CTA
  that reads that tile. Masked values are set to zero there, so a slot that was never written may hold NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.ragged_paged_attention.gpu_primitives import add_and_fetch, store
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.options import AttentionOptions

LOG2E = math.log2(math.e)

MERGE = 4
"""Partial results loaded at a time when a sequence is merged."""


@dataclass(frozen=True)
class DecodeConfig:
    """What is tuned.

    Args:
        step: keys per step, a multiple of 64.
        stages: steps in flight in one CTA.
        ctas_per_sm: CTAs (thread blocks) that share a multiprocessor, bounded by shared memory and registers.
        min_chunk: smallest chunk, in steps.
        max_chunks: most chunks of a sequence, a power of two; longer rows get larger chunks.
    """

    step: int = 64
    stages: int = 2
    ctas_per_sm: int = 3
    min_chunk: int = 4
    max_chunks: int = 32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodePlan:
    """The stretches of one step's batch: the same for every layer with the same window.

    Args:
        rows: [R, 4] int32: length, first step, one past the last step, steps per chunk.
        stretches: [CTAs, 8] int32: row, KV head and step where the stretch begins, its number of steps, the CTA in
            which its first sequence begins, one past the last sequence's last step in this stretch, the number of
            rows that decode, of rows that live.
        counters: [CTAs] int32, or a reference to it: steps done of the sequence that begins in one CTA and ends in
            another. Zero before and after every call.
    """

    rows: jax.Array
    stretches: jax.Array
    counters: Any


def plan_decode(
    metadata: AttentionMetadata, *, num_kv_heads: int, sliding_window: int | None, num_sms: int, config: DecodeConfig
) -> DecodePlan:
    """Cut the decoding rows' work into one stretch per CTA, on the device."""
    num_rows = metadata.seq_lens.shape[0]
    num_ctas = num_sms * config.ctas_per_sm
    decode_rows = metadata.distribution[0]
    length = jnp.where(jnp.arange(num_rows) < decode_rows, metadata.seq_lens, 0)
    first = jnp.zeros_like(length) if sliding_window is None else jnp.maximum(length - sliding_window, 0) // config.step
    last = pl.cdiv(length, config.step)
    steps = last - first
    chunk = jnp.maximum(config.min_chunk, _next_power_of_two(pl.cdiv(steps, config.max_chunks)))
    ends = jnp.cumsum(steps * num_kv_heads, dtype=jnp.int32)
    total = ends[-1]

    def locate(at):
        """Row, head and step (from the sequence's first) of a place on the line."""
        row = jnp.minimum(jnp.searchsorted(ends, at, side="right", method="compare_all"), num_rows - 1)
        row = row.astype(jnp.int32)
        per_head = jnp.maximum(steps[row], 1)
        rest = at - (ends[row] - steps[row] * num_kv_heads)
        return row, rest // per_head, rest % per_head

    index = jnp.arange(num_ctas + 1, dtype=jnp.int32)
    border = (total // num_ctas) * index + (total % num_ctas) * index // num_ctas
    row, _, step = locate(border)
    begin = first[row] + step
    rounded = jnp.minimum(pl.cdiv(begin, chunk[row]) * chunk[row], last[row])
    border = jnp.where((step == 0) | (border >= total), border, border + rounded - begin)
    row, head, step = locate(border)
    sequence_begins = border - step
    begins_in = jnp.searchsorted(border[:-1], sequence_begins, side="right", method="compare_all") - 1
    last_row, _, last_step = locate(jnp.maximum(border[1:] - 1, 0))
    row, head, step = row[:-1], head[:-1], step[:-1]
    fields = (
        row, head, first[row] + step, border[1:] - border[:-1], begins_in[:-1], first[last_row] + last_step + 1,
        jnp.full_like(row, decode_rows), jnp.full_like(row, metadata.distribution[2]),
    )  # fmt: skip
    return DecodePlan(
        rows=jnp.stack([length, first, last, chunk], -1),
        stretches=jnp.stack(fields, -1).astype(jnp.int32),
        counters=jnp.zeros(num_ctas, jnp.int32),
    )


def _next_power_of_two(x: jax.Array) -> jax.Array:
    return jnp.int32(1) << (32 - lax.clz(jnp.maximum(x, 1) - 1))


def decode_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, kv_cache: Any, metadata: AttentionMetadata, plan: DecodePlan,
    options: AttentionOptions, sinks: jax.Array | None, *, num_sms: int, config: DecodeConfig, out: Any = None,
    interpret: Any = None,
) -> jax.Array | None:
    """Write the decoding rows' new keys and values into ``kv_cache`` and attend.

    Args:
        q: [T, H, D]; k, v: [T, K, D]: token r belongs to decoding row r. bfloat16 or float16.
        kv_cache: reference to [2, num_blocks, K, block_size, D], changed in place.
        plan: of this batch; its ``counters`` a reference.
        sinks: [H] extra logits of the denominator.
        out: reference to [T, H, D] that takes the decoding rows' results; without it they are returned.

    Returns:
        [R, H, D], or None with ``out``. Padding rows are zero; rows that live but do not decode are NaN, since the
        caller then chose the wrong program.
    """  # fmt: skip
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_rows = plan.rows.shape[0]
    num_heads, head_size = q.shape[1:]
    num_kv_heads, block_size = kv_cache.shape[2], kv_cache.shape[3]
    group = num_heads // num_kv_heads
    columns = 8 * pl.cdiv(group, 8)
    case = _Case(
        config, options, num_sms, group, columns, head_size, block_size, writes_all_rows=out is None,
        has_sinks=sinks is not None, atomic=interpret is None,
    )  # fmt: skip
    ctas = num_sms * config.ctas_per_sm
    slots = ctas * (config.max_chunks + 1)
    partials = (
        jax.ShapeDtypeStruct((slots, head_size, columns), jnp.float32),
        jax.ShapeDtypeStruct((slots, 2, columns), jnp.float32),
    )
    operands = [plan.rows, plan.stretches, metadata.block_tables, metadata.slot_mapping, q, k, v]
    if sinks is not None:
        sinks = (sinks.astype(jnp.float32) * LOG2E).reshape(num_kv_heads, group)
        operands.append(jnp.pad(sinks, ((0, 0), (0, columns - group))))
    operands += [plan.counters, kv_cache]
    result = () if out is not None else (jax.ShapeDtypeStruct((num_rows, num_heads, head_size), q.dtype),)
    results = plgpu.kernel(
        _kernel_body(case),
        out_type=(*result, *partials),
        grid=(ctas,),
        grid_names=("cta",),
        scratch_types=_scratch(case, q.dtype),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="paged_decode",
        interpret=interpret,
    )(*operands, *(() if out is None else (out,)))
    return results[0] if out is None else None


@dataclass(frozen=True)
class _Case:
    """What one compiled kernel is made for."""

    config: DecodeConfig
    options: AttentionOptions
    num_sms: int
    group: int
    columns: int
    head_size: int
    block_size: int
    writes_all_rows: bool
    has_sinks: bool
    atomic: bool


def _scratch(case: _Case, dtype: Any) -> dict[str, Any]:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    columns, head_size, step, stages = case.columns, case.head_size, case.config.step, case.config.stages
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    copies = 2 * max(step // case.block_size, 1)
    return dict(
        q_in=plgpu.SMEM((stages + 1, columns, head_size), dtype),
        q_s=plgpu.SMEM((columns, head_size), dtype, transforms=tiled),
        k_s=plgpu.SMEM((stages, step, head_size), dtype, transforms=tiled),
        v_s=plgpu.SMEM((stages, step, head_size), dtype, transforms=tiled),
        new_s=plgpu.SMEM((stages + 1, 2, head_size), dtype),
        p_s=plgpu.SMEM((columns, step), dtype, transforms=tiled),
        out_s=plgpu.SMEM((columns, head_size), dtype),
        part_s=plgpu.SMEM((head_size, columns), jnp.float32),
        stat_s=plgpu.SMEM((2, columns), jnp.float32),
        count_s=plgpu.SMEM((1,), jnp.int32),
        kv_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        q_full=plgpu.Barrier(num_barriers=stages + 1),
        new_full=plgpu.Barrier(num_arrivals=2, num_barriers=stages + 1),
    )


def _kernel_body(case: _Case):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    config, options = case.config, case.options
    step_size, stages, columns, head_size = config.step, config.stages, case.columns, case.head_size
    block_size, group, window = case.block_size, case.group, options.sliding_window
    # A piece is at least one step, so loads run at most ``stages`` pieces ahead of the one whose buffers are in use.
    sides = stages + 1
    column_layout = plgpu.Layout.WGMMA.reduce(0)

    def per_column(value):
        return plgpu.layout_cast(jnp.full((columns,), value, jnp.float32), column_layout)

    def tile(rows, value):
        return plgpu.layout_cast(jnp.full((rows, columns), value, jnp.float32), plgpu.Layout.WGMMA)

    def over_rows(x, rows):
        return lax.broadcast_in_dim(x, (rows, columns), [1])

    def paged_decode(
        rows, stretches, tables, slot_mapping, q, k, v, *refs,
        q_in, q_s, k_s, v_s, new_s, p_s, out_s, part_s, stat_s, count_s, kv_full, q_full, new_full,
    ):  # fmt: skip
        sinks, refs = (refs[0], refs[1:]) if case.has_sinks else (None, refs)
        counters, cache, out, part, stat = refs
        num_rows, num_kv_heads, table_width = rows.shape[0], cache.shape[2], tables.shape[1]
        num_ctas = case.num_sms * config.ctas_per_sm
        # Neighbours on the line share a multiprocessor: thread blocks are handed out to all of them in turn.
        cta = lax.axis_index("cta")
        me = lax.rem(cta, case.num_sms) * config.ctas_per_sm + lax.div(cta, case.num_sms)

        def load_tile(row, head, step, slot):
            """Start the copies of one step's keys and values."""
            if block_size >= step_size:
                at = step * step_size
                block = tables[row, lax.div(at, block_size)]
                inside = pl.ds(pl.multiple_of(lax.rem(at, block_size), step_size), step_size)
                plgpu.copy_gmem_to_smem(cache.at[0, block, head, inside], k_s.at[slot], kv_full.at[slot])
                plgpu.copy_gmem_to_smem(cache.at[1, block, head, inside], v_s.at[slot], kv_full.at[slot])
                return
            per_step = step_size // block_size
            length = rows[row, 0]
            for i in range(per_step):
                logical = step * per_step + i
                part_of_slot = pl.ds(i * block_size, block_size)
                # Beyond the row's end nothing is read; what is left in the slot is masked and zeroed.
                inside = logical * block_size < length
                block = tables[row, jnp.minimum(logical, table_width - 1)]

                @pl.when(inside)
                def _copy(block=block, part_of_slot=part_of_slot):
                    for kv, buffer in enumerate((k_s, v_s)):
                        plgpu.copy_gmem_to_smem(
                            cache.at[kv, block, head], buffer.at[slot, part_of_slot], kv_full.at[slot]
                        )

                @pl.when(jnp.logical_not(inside))
                def _skip():
                    plgpu.barrier_arrive(kv_full.at[slot])
                    plgpu.barrier_arrive(kv_full.at[slot])

        def prefetch(ahead, slot):
            """Start loading the step that ``ahead`` points at, if any, and advance it."""
            row, head, step, last, left, piece, fresh = ahead

            @pl.when(left > 0)
            def _load():
                load_tile(row, head, step, slot)

                @pl.when(fresh == 1)
                def _query():
                    side = lax.rem(piece, sides)
                    ours = q.at[row, pl.ds(head * group, group)]
                    plgpu.copy_gmem_to_smem(ours, q_in.at[side, pl.ds(0, group)], q_full.at[side])

                    @pl.when(left >= last - step)
                    def _new_token():
                        plgpu.copy_gmem_to_smem(k.at[row, head], new_s.at[side, 0], new_full.at[side])
                        plgpu.copy_gmem_to_smem(v.at[row, head], new_s.at[side, 1], new_full.at[side])

            ends = step + 1 == last
            head = jnp.where(ends, head + 1, head)
            wraps = head == num_kv_heads
            row = jnp.minimum(jnp.where(wraps, row + 1, row), num_rows - 1)
            head = jnp.where(wraps, 0, head)
            step = jnp.where(ends, rows[row, 1], step + 1)
            fresh = ends.astype(jnp.int32)
            return row, head, step, rows[row, 2], left - 1, piece + fresh, fresh

        def patch(slot, row, head, step, piece, first, last, length):
            """Put the new token into the loaded tile, zero its masked values, and write the token to the cache."""
            side = lax.rem(piece, sides)
            is_last = step == last - 1

            @pl.when(is_last)
            def _wait():
                plgpu.barrier_wait(new_full.at[side])

            at = plgpu.broadcasted_iota(jnp.int32, (step_size, 64), 0, layout=plgpu.Layout.WGMMA) + step * step_size
            is_new = at == length - 1
            seen = at < length
            if window is not None:
                seen = seen & (at >= length - window)
            for begin in range(0, head_size, 64):  # in parts, to hold fewer registers
                part_of_head = pl.ds(begin, 64)
                for i, buffer in enumerate((k_s, v_s)):
                    tile_ref = buffer.at[slot, :, part_of_head]
                    new = plgpu.load(new_s.at[side, i, part_of_head], layout=column_layout, optimized=False)
                    old = plgpu.load(tile_ref, layout=plgpu.Layout.WGMMA)
                    if buffer is v_s:
                        old = jnp.where(seen, old, jnp.zeros_like(old))
                    tile_ref[...] = jnp.where(is_new, lax.broadcast_in_dim(new, at.shape, [1]), old)
            plgpu.commit_smem()
            target = slot_mapping[row]

            @pl.when(is_last & (target >= 0) & (target < cache.shape[1] * block_size))
            def _write():
                block, offset = lax.div(target, block_size), lax.rem(target, block_size)
                plgpu.copy_smem_to_gmem(new_s.at[side, 0], cache.at[0, block, head, offset])
                plgpu.copy_smem_to_gmem(new_s.at[side, 1], cache.at[1, block, head, offset])

        def fold(state, chunk_state):
            top, total, acc = state
            chunk_top, chunk_total, chunk_acc = chunk_state
            new_top = jnp.maximum(top, chunk_top)
            old, new = jnp.exp2(top - new_top), jnp.exp2(chunk_top - new_top)
            acc = acc * over_rows(old, head_size) + chunk_acc * over_rows(new, head_size)
            return new_top, total * old + chunk_total * new, acc

        def store_partial(slot, state):
            top, total, acc = state
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            store(part_s, acc)
            store(stat_s.at[0], top)
            store(stat_s.at[1], total)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(part_s, part.at[slot])
            plgpu.copy_smem_to_gmem(stat_s, stat.at[slot])

        def load_partial(slot):
            top = plgpu.load(stat.at[slot, 0], layout=column_layout, optimized=False)
            total = plgpu.load(stat.at[slot, 1], layout=column_layout, optimized=False)
            return top, total, plgpu.load(part.at[slot], layout=plgpu.Layout.WGMMA, optimized=False)

        def merge(folded, final):
            """Fold the chunks in the slots after ``folded`` into what is there. ``MERGE`` loads are in flight."""

            def several(turn, state):
                at = folded + 1 + turn * MERGE
                loaded = [load_partial(jnp.minimum(at + i, final)) for i in range(MERGE)]
                for i, (top, total, acc) in enumerate(loaded):
                    # Past the end the weights become zero.
                    state = fold(state, (top + jnp.where(at + i <= final, 0.0, -jnp.inf), total, acc))
                return state

            return lax.fori_loop(0, pl.cdiv(final - folded, MERGE), several, load_partial(folded))

        def fill_other_rows(decode_rows, live_rows):
            def one_row(turn, _):
                row = decode_rows + me + turn * num_ctas
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                value = jnp.where(row < live_rows, jnp.float32(jnp.nan), jnp.float32(0.0))
                store(out_s.T, (tile(head_size, 0.0) + value).astype(out_s.dtype))
                plgpu.commit_smem()
                for head in range(num_kv_heads):
                    target = out.at[row, pl.ds(head * group, group)]
                    plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, group)], target)

            lax.fori_loop(0, pl.cdiv(num_rows - decode_rows - me, num_ctas), one_row, None)

        def finish(row, head, state):
            _, total, acc = state
            store(out_s.T, (acc / over_rows(total, head_size)).astype(out_s.dtype))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s.at[pl.ds(0, group)], out.at[row, pl.ds(head * group, group)])

        def one_piece(carry):
            row, head, step, left, piece, done, ahead = carry
            length, first, last, chunk = (rows[row, i] for i in range(4))
            stop = jnp.minimum(last, step + left)
            starts, ends = step == first, stop == last
            begins_in = jnp.where(starts, me, stretches[me, 4])
            slot_of = lambda at: begins_in * (config.max_chunks + 1) + lax.div(at, chunk) - lax.div(first, chunk)
            side = lax.rem(piece, sides)
            plgpu.barrier_wait(q_full.at[side])
            # Rows of q_in past the group hold anything: their columns are computed and dropped.
            q_s.T[...] = plgpu.load(q_in.at[side].T, layout=plgpu.Layout.WGMMA, optimized=False)
            plgpu.commit_smem()
            if sinks is None:
                state = per_column(-jnp.inf), per_column(0.0)
            else:
                state = plgpu.load(sinks.at[head], layout=column_layout, optimized=False), per_column(1.0)
            state = (*state, tile(head_size, 0.0))

            def one_step(at, carry):
                done, ahead, (top, total, acc) = carry
                slot = lax.rem(done, stages)
                plgpu.barrier_wait(kv_full.at[slot])
                needs_patch = at == last - 1
                if window is not None:
                    needs_patch |= at == first
                pl.when(needs_patch)(lambda: patch(slot, row, head, at, piece, first, last, length))

                def scores(acc_ref):
                    plgpu.wgmma(acc_ref, k_s.at[slot], q_s.T)
                    return acc_ref[...]

                s = pl.run_scoped(scores, plgpu.ACC((step_size, columns), jnp.float32))
                if options.soft_cap is None:
                    s = s * (options.scale * LOG2E)
                else:
                    s = jnp.tanh(s * (options.scale / options.soft_cap)) * (options.soft_cap * LOG2E)
                position = plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA) + at * step_size
                visible = position < length
                if window is not None:
                    visible &= position >= length - window
                s = jnp.where(visible, s, -jnp.inf)
                new_top = jnp.maximum(top, s.max(axis=0))
                shrink = jnp.exp2(top - new_top)
                p = jnp.exp2(s - over_rows(new_top, step_size))
                p_s.T[...] = p.astype(p_s.dtype)
                plgpu.commit_smem()

                def values(acc_ref):
                    plgpu.wgmma(acc_ref, v_s.at[slot].T, p_s.T)
                    return acc_ref[...]

                weighted = pl.run_scoped(values, plgpu.ACC((head_size, columns), jnp.float32))
                ahead = prefetch(ahead, slot)
                total = total * over_rows(shrink, step_size) + p
                return done + 1, ahead, (new_top, total, acc * over_rows(shrink, head_size) + weighted)

            def one_chunk(_, carry):
                at, done, ahead, state = carry
                end = jnp.minimum(stop, (lax.div(at, chunk) + 1) * chunk)
                fresh = per_column(-jnp.inf), tile(step_size, 0.0), tile(head_size, 0.0)
                done, ahead, (top, total, acc) = lax.fori_loop(at, end, one_step, (done, ahead, fresh))
                chunk_state = top, total.sum(axis=0), acc
                pl.when(jnp.logical_not(starts))(lambda: store_partial(slot_of(at), chunk_state))
                return end, done, ahead, fold(state, chunk_state)

            num_chunks = pl.cdiv(stop, chunk) - lax.div(step, chunk)
            _, done, ahead, state = lax.fori_loop(0, num_chunks, one_chunk, (step, done, ahead, state))

            @pl.when(starts & ends)
            def _whole():
                finish(row, head, state)

            @pl.when(jnp.logical_not(starts & ends))
            def _shared():
                pl.when(starts)(lambda: store_partial(slot_of(stop - 1), state))
                plgpu.wait_smem_to_gmem(0)
                before = add_and_fetch(counters.at[pl.ds(begins_in, 1)], count_s, stop - step, atomic=case.atomic)

                @pl.when(before + stop - step == last - first)
                def _merge():
                    counters[begins_in] = jnp.int32(0)
                    # The first CTA folded its own chunks and left the result in the slot of the last of them.
                    folded = slot_of(stretches[begins_in, 5] - 1)
                    finish(row, head, merge(folded, slot_of(last - 1)))

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            next_head = jnp.where(ends, head + 1, head)
            wraps = next_head == num_kv_heads
            next_row = jnp.minimum(row + wraps.astype(jnp.int32), num_rows - 1)
            next_head = jnp.where(wraps, 0, next_head)
            return next_row, next_head, rows[next_row, 1], left - (stop - step), piece + 1, done, ahead

        row, head, step, left = (stretches[me, i] for i in range(4))
        ahead = row, head, step, rows[row, 2], left, jnp.int32(0), jnp.int32(1)
        for slot in range(stages):
            ahead = prefetch(ahead, slot)
        zero = jnp.int32(0)
        lax.while_loop(lambda carry: carry[3] > 0, one_piece, (row, head, step, left, zero, zero, ahead))
        if case.writes_all_rows:
            fill_other_rows(stretches[me, 6], stretches[me, 7])
        plgpu.wait_smem_to_gmem(0)

    return paged_decode
