"""The decode kernel: what a CTA does with its stretch of the plan. ``gpu_decode`` says the ideas behind it."""

from __future__ import annotations

import functools
import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_gpu.primitives import (
    add_and_fetch,
    copy_layout,
    store,
    warpgroup_barrier,
)
from pallas_kernels.ragged_paged_attention.gpu_decode_case import Case
from pallas_kernels.ragged_paged_attention.gpu_decode_plan import Stretch, blocks_per_step
from pallas_kernels.ragged_paged_attention.gpu_partials import load_partial, save_partial, store_columns

LOG2E = math.log2(math.e)


def kernel_body(case: Case):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    config, options = case.config, case.options
    step_size, stages, columns, head_size = config.step, config.stages, case.columns, case.head_size
    block_size, group, window = case.block_size, case.group, options.sliding_window
    column_layout = plgpu.Layout.WGMMA.reduce(0)

    def per_column(value):
        return plgpu.layout_cast(jnp.full((columns,), value, jnp.float32), column_layout)

    def tile(rows, value):
        return plgpu.layout_cast(jnp.full((rows, columns), value, jnp.float32), plgpu.Layout.WGMMA)

    def nothing(rows=head_size):
        """The state before any key."""
        return per_column(-jnp.inf), per_column(0.0), tile(rows, 0.0)

    def over_rows(x, rows):
        return lax.broadcast_in_dim(x, (rows, columns), [1])

    def paged_decode(
        rows, stretches, tables, slot_mapping, q, k, v, *refs,
        k_s, v_s, q_s, new_s, weights_or_count, k_full, v_full, q_full, new_full, q_in=None,
        k_in=None, v_in=None, scales_in=None,
    ):  # fmt: skip
        arriving = ((k_in, k_full), (v_in, v_full)) if case.widens else ((k_s, k_full), (v_s, v_full))
        sinks, refs = (refs[0], refs[1:]) if case.has_sinks else (None, refs)
        scales, refs = (refs[0], refs[1:]) if case.scaled else (None, refs)
        counters, cache, out, part, stat = refs
        p_s, count_s = weights_or_count
        num_kv_heads, table_width, num_groups = cache.shape[2], tables.shape[1], stretches.shape[0]
        me, head = lax.div(lax.axis_index("cta"), num_kv_heads), lax.rem(lax.axis_index("cta"), num_kv_heads)
        num_rows = stretches[me, Stretch.ROWS]
        per_step = blocks_per_step(step_size, block_size)

        def barrier():
            if not config.auto_barriers:
                warpgroup_barrier(compiled=case.atomic)

        def block_ids(row, step):
            """The KV blocks of a step; which may lie past the row's end, where nobody looks at them."""
            at = lax.div(step * step_size, block_size)
            return tuple(tables[row, jnp.minimum(at + i, table_width - 1)] for i in range(per_step))

        def new_token(side, half):
            """Where the new key or value lies."""
            ours = new_s.at[side, half]
            return ours if new_s.shape[2] == head_size else ours.at[pl.ds(0, head_size)]

        def scales_at(slot, half, token, count):
            """Where the scales of ``count`` tokens lie, of which the first is the step's ``token``-th."""
            together = case.scales_together
            inside = pl.ds(token % together, count)
            return scales_in.at[slot, half, token // together, inside]

        def load_tile(blocks, step, length, slot):
            """Start the copies of one step's keys and values."""
            if block_size >= step_size:
                at = lax.rem(step * step_size, block_size)
                inside = pl.ds(pl.multiple_of(at, step_size), step_size)
                for half, (buffer, full) in enumerate(arriving):
                    ours = cache.at[half, blocks[0], head, inside]
                    plgpu.copy_gmem_to_smem(ours, buffer.at[slot], full.at[slot])
                    if case.scaled:
                        ours = scales.at[blocks[0], half, head, inside]
                        plgpu.copy_gmem_to_smem(ours, scales_at(slot, half, 0, step_size), full.at[slot])
                return
            for half, (buffer, full) in enumerate(arriving):
                for i, block in enumerate(blocks):
                    target = pl.ds(i * block_size, block_size)
                    # Beyond the row's end nothing is read; what is left in the slot is masked and zeroed.
                    inside = step * step_size + i * block_size < length

                    @pl.when(inside)
                    def _copy(half=half, buffer=buffer, full=full, i=i, block=block, target=target):
                        ours = cache.at[half, block, head]
                        plgpu.copy_gmem_to_smem(ours, buffer.at[slot, target], full.at[slot])
                        if case.scaled:
                            ours = scales.at[block, half, head]
                            place = scales_at(slot, half, i * block_size, block_size)
                            plgpu.copy_gmem_to_smem(ours, place, full.at[slot])

                    @pl.when(jnp.logical_not(inside))
                    def _skip(full=full):
                        for _ in range(2 if case.scaled else 1):
                            plgpu.barrier_arrive(full.at[slot])

        def prefetch(ahead, slot):
            """Start loading the step that ``ahead`` points at, if any, and advance it.

            Its block ids were read a step ago; those of the next one are read now, so that nobody waits for them.
            """
            row, step, length, last, left, ids = ahead
            pl.when(left > 0)(lambda: load_tile(ids, step, length, slot))
            ends = step + 1 == last
            row = jnp.minimum(row + ends.astype(jnp.int32), num_rows - 1)
            first = 0 if window is None else rows[row, 1]
            step = jnp.where(ends, first, step + 1)
            return row, step, rows[row, 0], rows[row, 2], left - 1, block_ids(row, step)

        def load_queries(row, side, with_new_token):
            """Start loading a row's queries and, for whoever does its last step, its new key and value."""
            if case.queries_fill_tiles:
                ours, target = q.at[row, pl.ds(pl.multiple_of(head * group, 8), group)], q_s.at[side]
            else:
                ours, target = q.at[row, pl.ds(head * group, group)], q_in.at[pl.ds(side * group, group)]
            plgpu.copy_gmem_to_smem(ours, target, q_full.at[side])

            @pl.when(with_new_token)
            def _new_token():
                plgpu.copy_gmem_to_smem(k.at[row, head], new_token(side, 0), new_full.at[side])
                plgpu.copy_gmem_to_smem(v.at[row, head], new_token(side, 1), new_full.at[side])

        def widened(value, scale=None):
            value = value.astype(jnp.float32)
            return (value if scale is None else value * scale).astype(q.dtype)

        def widen(slot):
            """Bring a tile of small elements where the products want it, in their type."""
            rows = case.scales_together if case.scaled else step_size
            layout = copy_layout(rows, 64)

            def piece(number, _):
                first = number * rows if isinstance(number, int) else pl.multiple_of(number * rows, rows)
                for half, (source, target) in enumerate(((k_in, k_s), (v_in, v_s))):
                    scale = None
                    if case.scaled:
                        scale = scales_in.at[slot, half, number, pl.ds(0, rows)]
                        scale = plgpu.load(scale, layout=layout.reduce(1), optimized=False)
                        scale = lax.broadcast_in_dim(scale, (rows, 64), [0])
                    for begin in range(0, head_size, 64):
                        part = pl.ds(first, rows), pl.ds(begin, 64)
                        value = plgpu.load(source.at[slot, *part], layout=layout, optimized=False)
                        target[0, *part] = widened(value, scale)

            if rows == step_size:
                piece(0, None)
            else:
                lax.fori_loop(0, step_size // rows, piece, None)
            plgpu.commit_smem()

        def patch(half, slot, step, length, is_last, side, target):
            """Put the new token into the loaded keys or values, and zero masked values, 8 tokens at a time."""
            buffer, layout, begin = (k_s, v_s)[half], copy_layout(8, head_size), step * step_size
            shape = (8, head_size)

            def eight(number):
                return buffer.at[slot, pl.ds(pl.multiple_of(number * 8, 8), 8)]

            def zero(number, _):
                zeros = jnp.zeros(shape, buffer.dtype)
                store(eight(number), plgpu.layout_cast(zeros, layout))

            def mend(number, with_new):
                value = plgpu.load(eight(number), layout=layout, optimized=False)
                at = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout) + (begin + number * 8)
                if half == 1:
                    seen = at < length
                    if window is not None:
                        seen &= at >= length - window
                    value = jnp.where(seen, value, jnp.zeros_like(value))
                if with_new:
                    new = plgpu.load(new_token(side, half), layout=layout.reduce(0), optimized=False)
                    if case.widens:
                        scale = None
                        if case.scaled:
                            place = jnp.clip(target, 0, cache.shape[1] * block_size - 1)
                            scale = scales[lax.div(place, block_size), half, head, lax.rem(place, block_size)]
                        new = widened(new, scale)
                    value = jnp.where(at == length - 1, lax.broadcast_in_dim(new, shape, [1]), value)
                store(eight(number), value)

            @pl.when(is_last)
            def _end():
                if half == 0:
                    plgpu.barrier_wait(new_full.at[side])
                newest = lax.div(length - 1 - begin, 8)
                mend(newest, True)
                if half == 1:
                    lax.fori_loop(newest + 1, step_size // 8, zero, None)

            if window is not None and half == 1:
                plgpu.commit_smem()  # both ends of a window may be in the same eight
                oldest = jnp.maximum(length - window - begin, 0)
                lax.fori_loop(0, lax.div(oldest, 8), zero, None)
                pl.when(oldest > 0)(lambda: mend(jnp.minimum(lax.div(oldest, 8), step_size // 8 - 1), False))
            plgpu.commit_smem()

        def write_new(side, target):
            """Write the new token to its slot."""

            @pl.when((target >= 0) & (target < cache.shape[1] * block_size))
            def _write():
                block, offset = lax.div(target, block_size), lax.rem(target, block_size)
                plgpu.copy_smem_to_gmem(new_token(side, 0), cache.at[0, block, head, offset])
                plgpu.copy_smem_to_gmem(new_token(side, 1), cache.at[1, block, head, offset])

        def fold(state, chunk_state):
            top, total, acc = state
            chunk_top, chunk_total, chunk_acc = chunk_state
            new_top = jnp.maximum(top, chunk_top)
            old, new = jnp.exp2(top - new_top), jnp.exp2(chunk_top - new_top)
            acc = acc * over_rows(old, acc.shape[0]) + chunk_acc * over_rows(new, acc.shape[0])
            return new_top, total * old + chunk_total * new, acc

        def store_state(slot, state):
            save_partial(part.at[slot], stat.at[slot], state, group, compiled=case.atomic)

        def load_state(slot, exists):
            shape = (head_size, columns)
            return load_partial(
                part.at[slot], stat.at[slot], shape, group, exists, halves=case.merges_halves,
                compiled=case.atomic,
            )  # fmt: skip

        def merge(folded, final):
            """Fold the states in the slots from ``folded`` to ``final``, in order."""
            width = case.merge_width

            def several(turn, state):
                at = folded + turn * width
                loaded = [load_state(jnp.minimum(at + i, final), at + i <= final) for i in range(width)]
                for i, (top, total, acc) in enumerate(loaded):
                    # Past the end the weights become zero.
                    state = fold(state, (top + jnp.where(at + i <= final, 0.0, -jnp.inf), total, acc))
                return state

            rows = head_size // 2 if case.merges_halves else head_size
            return lax.fori_loop(0, pl.cdiv(final + 1 - folded, width), several, nothing(rows))

        def store_result(row, value, halves=False):
            ours = out.at[row, pl.ds(head * group, group)]
            store_columns(ours, value.astype(q.dtype), halves=halves, compiled=case.atomic)

        def fill_other_rows(decode_rows, live_rows):
            def one_row(turn, _):
                row = decode_rows + me + turn * num_groups
                value = jnp.where(row < live_rows, jnp.float32(jnp.nan), jnp.float32(0.0))
                store_result(row, tile(head_size, 0.0) + value)

            lax.fori_loop(0, pl.cdiv(num_rows - decode_rows - me, num_groups), one_row, None)

        def finish(row, state, halves=False):
            top, total, acc = state
            if sinks is None:
                share = 1.0 / total
            else:
                sink = plgpu.load(sinks.at[head], layout=column_layout, optimized=False)
                highest = jnp.maximum(top, sink)
                share = jnp.exp2(top - highest)
                share = share / (total * share + jnp.exp2(sink - highest))
            store_result(row, acc * over_rows(share, acc.shape[0]), halves)

        def one_piece(carry):
            row, step, left, piece, done, ahead, (length, first, last, chunk) = carry
            stop = jnp.minimum(last, step + left)
            starts, ends = step == first, stop == last
            begins_in = jnp.where(starts, me, stretches[me, Stretch.BEGINS_IN])
            counter = begins_in * num_kv_heads + head
            target = slot_mapping[row]  # early, since only who does the last step waits for it
            begin_chunk = lax.div(step, chunk)
            slots = counter * (config.max_chunks + 1) - lax.div(first, chunk)

            def slot_of(number):
                """Where that chunk is left for whoever merges the sequence."""
                return slots + number

            side = lax.rem(piece, 2)
            plgpu.barrier_wait(q_full.at[side])
            if case.queries_fill_tiles:
                queries = q_s.at[side]
            else:
                # Rows past the group hold anything: their columns are computed and dropped.
                queries, raw = q_s.at[0], q_in.at[pl.ds(side * group, columns)]
                queries.T[...] = plgpu.load(raw.T, layout=plgpu.Layout.WGMMA, optimized=False)
                plgpu.commit_smem()
            # The next row's queries go where those of the row before this one were, which is done with.
            next_row = jnp.minimum(row + 1, num_rows - 1)
            next_info = tuple(rows[next_row, i] for i in range(4))
            next_left = left - (stop - step)

            @pl.when(next_left > 0)
            def _next_row():
                load_queries(next_row, 1 - side, next_left >= next_info[2] - next_info[1])

            def one_step(at, carry):
                done, ahead, (top, total, acc) = carry
                # Of one stage, a zero that the compiler does not know: it would keep a register for every address.
                slot = lax.rem(done, stages) if stages > 1 else jnp.minimum(done, 0)
                plgpu.barrier_wait(k_full.at[slot])
                arrived = slot
                if case.widens or not config.separate:
                    plgpu.barrier_wait(v_full.at[slot])
                if case.widens:
                    widen(slot)
                    ahead = prefetch(ahead, slot)
                    slot = 0
                is_last = at == last - 1
                pl.when(is_last)(lambda: patch(0, slot, at, length, is_last, side, target))

                def scores(acc_ref):
                    plgpu.wgmma(acc_ref, k_s.at[slot], queries.T)
                    return acc_ref[...]

                s = pl.run_scoped(scores, plgpu.ACC((step_size, columns), jnp.float32))
                if options.soft_cap is None:
                    s = s * (options.scale * LOG2E)
                else:
                    s = jnp.tanh(s * (options.scale / options.soft_cap)) * (options.soft_cap * LOG2E)
                position = (
                    plgpu.broadcasted_iota(jnp.int32, s.shape, 0, layout=plgpu.Layout.WGMMA) + at * step_size
                )
                visible = position < length
                if window is not None:
                    visible &= position >= length - window
                s = jnp.where(visible, s, -jnp.inf)
                new_top = jnp.maximum(top, s.max(axis=0))
                shrink = jnp.exp2(top - new_top)
                p = jnp.exp2(s - over_rows(new_top, step_size))
                p_s.T[...] = p.astype(p_s.dtype)
                if config.separate and not case.widens:
                    plgpu.barrier_wait(v_full.at[arrived])
                needs_patch = is_last if window is None else is_last | (at == first)
                pl.when(needs_patch)(lambda: patch(1, slot, at, length, is_last, side, target))
                pl.when(is_last)(lambda: write_new(side, target))
                plgpu.commit_smem()

                def values(acc_ref):
                    plgpu.wgmma(acc_ref, v_s.at[slot].T, p_s.T)
                    return acc_ref[...]

                weighted = pl.run_scoped(values, plgpu.ACC((head_size, columns), jnp.float32))
                barrier()  # all warps are done with the tile and the weights
                if not case.widens:
                    ahead = prefetch(ahead, slot)
                total = total * over_rows(shrink, step_size) + p
                return done + 1, ahead, (new_top, total, acc * over_rows(shrink, head_size) + weighted)

            def one_chunk(number, carry):
                at, done, ahead, state = carry
                end = jnp.minimum(stop, (number + 1) * chunk)
                fresh = per_column(-jnp.inf), tile(step_size, 0.0), tile(head_size, 0.0)
                done, ahead, (top, total, acc) = lax.fori_loop(at, end, one_step, (done, ahead, fresh))
                chunk_state = top, total.sum(axis=0), acc
                pl.when(jnp.logical_not(starts))(lambda: store_state(slot_of(number), chunk_state))
                return end, done, ahead, fold(state, chunk_state)

            end_chunk = pl.cdiv(stop, chunk)
            _, done, ahead, state = lax.fori_loop(
                begin_chunk, end_chunk, one_chunk, (step, done, ahead, nothing())
            )

            @pl.when(starts & ends)
            def _whole():
                finish(row, state)

            @pl.when(jnp.logical_not(starts & ends))
            def _shared():
                pl.when(starts)(lambda: store_state(slot_of(end_chunk - 1), state))
                # The first CTA folded its own chunks and left the result in the slot of the last of them.
                first_stop = stretches[begins_in, Stretch.LAST_STOP]
                before = add_and_fetch(
                    counters.at[pl.ds(counter, 1)], count_s, stop - step, atomic=case.atomic
                )

                @pl.when(before + stop - step == last - first)
                def _merge():
                    counters[counter] = jnp.int32(0)
                    folded = slot_of(lax.div(first_stop - 1, chunk))
                    merged = merge(folded, slot_of(lax.div(last - 1, chunk)))
                    finish(row, merged, case.merges_halves)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            return next_row, next_info[1], next_left, piece + 1, done, ahead, next_info

        row, step, left = (stretches[me, column] for column in (Stretch.ROW, Stretch.STEP, Stretch.COUNT))
        info = tuple(stretches[me, Stretch.FIRST_ROW + i] for i in range(4))
        zero = jnp.int32(0)
        load_first = functools.partial(load_queries, row, 0, left >= info[2] - step)
        if stretches.shape[1] > Stretch.EARLY:
            # All of it is read before anything that the compiler may not move it past: one round trip to memory.
            width = 4 + per_step
            early = [
                [stretches[me, Stretch.EARLY + n * width + i] for i in range(width)]
                for n in range(stages + 1)
            ]
            pl.when(left > 0)(load_first)
            for slot, (_, at, length, _, *ids) in enumerate(early[:stages]):
                load_early = functools.partial(load_tile, ids, at, length, slot)
                pl.when(left > slot)(load_early)
            ahead = (*early[stages][:4], left - stages, tuple(early[stages][4:]))
        else:
            ahead = row, step, info[0], info[2], left, block_ids(row, step)
            pl.when(left > 0)(load_first)
            for slot in range(stages):
                ahead = prefetch(ahead, slot)
        lax.while_loop(lambda carry: carry[2] > 0, one_piece, (row, step, left, zero, zero, ahead, info))
        if case.writes_all_rows:
            fill_other_rows(stretches[me, Stretch.DECODE_ROWS], stretches[me, Stretch.LIVE_ROWS])
        plgpu.wait_smem_to_gmem(0)

    return paged_decode
