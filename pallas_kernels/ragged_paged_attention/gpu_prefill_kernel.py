"""The prefill kernel: what a CTA does with its tiles of the plan. ``gpu_prefill`` says the ideas behind it."""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.mosaic_gpu.primitives import copy_layout, store
from pallas_kernels.ragged_paged_attention.gpu_prefill_case import Case
from pallas_kernels.ragged_paged_attention.gpu_prefill_plan import CONSUMERS, ROWS

LOG2E = math.log2(math.e)
NOTHING_SEEN = -1e30
"""Running maximum before any key was seen: finite, so that a wholly masked step is the identity."""


def kernel_body(case: Case):
    from jax.experimental.pallas import mosaic_gpu as plgpu

    config, options, shape, group = case.config, case.options, case.shape, case.group
    step_size, stages, window = config.step, config.stages, options.sliding_window
    head_size, block_size, per_step, together = (
        case.head_size, case.block_size, case.blocks_per_step, case.scales_together,
    )  # fmt: skip
    query_buffers, arriving, num_ctas = case.query_buffers, case.arriving, case.num_ctas
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
        sinks, refs = (refs[0], refs[1:]) if case.has_sinks else (None, refs)
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
