"""The dense kernel: what a worker does with its stretch of the line. ``gpu_product`` says the ideas behind it."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.dense_matmul.gpu_case import Case
from pallas_kernels.dense_matmul.gpu_flags import signal, store_transposed, wait_for
from pallas_kernels.dense_matmul.gpu_tuning import ALIGNED, ROWS
from pallas_kernels.mosaic_gpu.primitives import add_and_fetch, store


def kernel_body(case: Case, dtype: Any) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    config, step_size, stages = case.config, case.step, case.stages
    width, columns, cluster, chunks = config.width, config.columns, config.cluster, case.chunks
    consumers = config.consumers

    def dense_matmul(
        x, weight, *refs, weights_s, tokens_s, out_s, full, free, count_s, up_s=None, up_full=None, up_free=None,
        residual_full=None,
    ):  # fmt: skip
        residual, refs = (refs[0], refs[1:]) if case.has_residual else (None, refs)
        token_tiles, refs = (refs[0][0], refs[1:]) if case.many_tokens else (1, refs)
        next_weight, refs = (refs[0], refs[1:]) if case.next is not None else (None, refs)
        line = case.line(token_tiles)
        counters, out, *refs = refs
        handed, refs = (refs[0], refs[1:]) if case.shares_chunks else (None, refs)
        partials = refs[0] if chunks > 1 and not case.folds else None
        worker, warpgroup = lax.axis_index("worker"), lax.axis_index("warpgroup")
        rank = lax.axis_index("cluster") if cluster > 1 else 0

        def walk(line, worker, action, carry):
            """``action(item, carry)`` for the items of a worker's stretch, the last one first."""
            begin, end = line.border(worker), line.border(worker + 1)

            def one_item(state):
                stop, carry = state
                tile, chunk, first, last = line.chunk_of(stop - 1)
                start = jnp.maximum(first, begin)
                return start, action((tile, chunk, start, stop, start > first, stop < last), carry)

            return lax.while_loop(lambda state: state[0] > begin, one_item, (end, carry))[1]

        def place(case, tile, consumer, token_tiles=token_tiles):
            """First token, first row of the weight, first output of 64, and whether there are such."""
            block = lax.div(tile, jnp.int32(token_tiles))
            tokens = pl.multiple_of((tile - block * token_tiles) * width, ALIGNED)
            block = block * cluster + rank
            if case.gated:
                output = pl.multiple_of(block * ROWS, ROWS)
                row = output + consumer * (case.outputs // 2)
                return tokens, pl.multiple_of(row, ROWS), output, output < case.outputs // 2
            output = pl.multiple_of((block * case.config.consumers + consumer) * ROWS, ROWS)
            return tokens, output, output, output < case.outputs

        @pl.when(warpgroup == consumers)
        def _producer():
            if consumers == 2:
                plgpu.set_max_registers(config.producer_registers, action="decrease")

            def prefetch(coming):
                """What the next product's workers load first, its own tiles in its own order."""
                its_line = coming.line(1)

                def bring(item, left):
                    tile, _, start, stop, _, _ = item

                    def one_step(at, _):
                        first = pl.multiple_of((at - tile * its_line.steps) * coming.step, coming.step)
                        for consumer in range(coming.config.consumers):
                            _, row, _, exists = place(coming, tile, consumer, 1)
                            block = next_weight.at[pl.ds(row, ROWS), pl.ds(first, coming.step)]
                            plgpu.async_prefetch(block, predicate=exists)

                    steps = jnp.minimum(stop - start, left)
                    lax.fori_loop(start, start + steps, one_step, None)
                    return left - steps

                for turn in range(pl.cdiv(its_line.workers, case.num_workers)):
                    steps = jnp.int32(config.ahead * 128 // coming.step)
                    walk(its_line, worker + turn * case.num_workers, bring, steps)

            def load(item, done):
                tile, _, start, stop, _, _ = item

                def one_step(at, done):
                    slot = lax.rem(done, stages)
                    pl.when(done >= stages)(lambda: plgpu.barrier_wait(free.at[slot]))
                    first = (at - tile * line.steps) * step_size
                    inner = pl.ds(pl.multiple_of(first, step_size), step_size)
                    for consumer in range(consumers):
                        tokens, row, _, exists = place(case, tile, consumer)

                        @pl.when(exists)
                        def _load(consumer=consumer, row=row):
                            plgpu.copy_gmem_to_smem(
                                weight.at[pl.ds(row, ROWS), inner],
                                weights_s.at[slot, consumer],
                                full.at[slot],
                            )

                        # The arrival that the copy would make.
                        pl.when(jnp.logical_not(exists))(lambda: plgpu.barrier_arrive(full.at[slot]))
                    plgpu.copy_gmem_to_smem(
                        x.at[pl.ds(tokens, width), inner], tokens_s.at[slot], full.at[slot],
                        collective_axes="cluster" if cluster > 1 else None,
                    )  # fmt: skip
                    return done + 1

                return lax.fori_loop(start, stop, one_step, done)

            done = walk(line, worker, load, jnp.int32(0))
            if case.next is not None:
                prefetch(case.next)
            # Others of the cluster may still send to this one, or look at its barriers.
            for slot in range(stages):
                pl.when(done > slot)(lambda slot=slot: plgpu.barrier_wait(free.at[slot]))

        @pl.when(warpgroup < consumers)
        def _consumer():
            if consumers == 2:
                plgpu.set_max_registers(config.consumer_registers, action="increase")
            ours = out_s.at[0 if case.gated else warpgroup]
            loads_early = case.has_residual and width == columns

            def leaves(piece, tokens, output):
                """The piece's tokens of this consumer's outputs, in global memory."""
                return out.at[pl.ds(tokens + piece * columns, columns), pl.ds(output, ROWS)]

            def load_residual(piece, tokens, output):
                rows = pl.ds(tokens + piece * columns, columns)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the one before has left
                plgpu.copy_gmem_to_smem(
                    residual.at[rows, pl.ds(output, ROWS)], ours, residual_full.at[warpgroup]
                )

            def store_piece(value, piece, tokens, output):
                if case.out_dtype == "float32":
                    store_transposed(leaves(piece, tokens, output), value, direct=case.atomic)
                    return
                if residual is not None:
                    if not loads_early:
                        load_residual(piece, tokens, output)
                    plgpu.barrier_wait(residual_full.at[warpgroup])
                    before = plgpu.load(ours.T, layout=plgpu.Layout.WGMMA, optimized=False)
                    value = before.astype(jnp.float32) + value  # rounded once, as cuBLAS does
                else:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                ours.T[...] = value.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(ours, leaves(piece, tokens, output))

            def store_gated(value, piece, tokens, output):
                """The second consumer has the other half: it hands it over in shared memory."""

                @pl.when(warpgroup == 1)
                def _up():
                    plgpu.barrier_wait(up_free)
                    store(up_s, value.astype(dtype))
                    plgpu.barrier_arrive(up_full)

                @pl.when(warpgroup == 0)
                def _gate():
                    gate = value.astype(dtype).astype(jnp.float32)
                    plgpu.barrier_wait(up_full)
                    up = plgpu.load(up_s, layout=plgpu.Layout.WGMMA, optimized=False)
                    # In XLA's order: there may be a kernel of its for other numbers of rows.
                    product = gate * (1.0 / (jnp.exp(-gate) + 1.0)) * up.astype(jnp.float32)
                    plgpu.barrier_arrive(up_free)
                    store_piece(product, piece, tokens, output)

            def finish(tile, value_of):
                """``value_of(piece)`` are a tile's sums, [64, columns]."""
                tokens, _, output, exists = place(case, tile, warpgroup)

                @pl.when(exists)
                def _store():
                    for piece in range(width // columns):
                        (store_gated if case.gated else store_piece)(value_of(piece), piece, tokens, output)

            def slot_of(tile):
                """Among 64 outputs by a tile's tokens."""
                return (tile * cluster + rank) * consumers + warpgroup

            def add_up(item, sums):
                """Leave a chunk's sums; whoever is the last of a tile's chunks adds them up in order."""
                tile, chunk = item[:2]
                slot = slot_of(tile)
                store(partials.at[slot * chunks + chunk], sums)
                counter = case.num_handed + slot
                before = add_and_fetch(
                    counters.at[pl.ds(counter, 1)], count_s.at[warpgroup], jnp.int32(1), atomic=case.atomic
                )

                if loads_early:
                    unused = place(case, tile, warpgroup)[3] & (before != chunks - 1)
                    pl.when(unused)(lambda: plgpu.barrier_wait(residual_full.at[warpgroup]))

                @pl.when(before == chunks - 1)
                def _merge():
                    counters[counter] = jnp.int32(0)

                    def load_partial(chunk, piece):
                        part = partials.at[slot * chunks + chunk, :, pl.ds(piece * columns, columns)]
                        return plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False)

                    def value_of(piece):
                        parts = [load_partial(chunk, piece) for chunk in range(chunks)]
                        return functools.reduce(lambda a, b: a + b, parts)

                    finish(tile, value_of)

            def products(sums, start, stop, done):
                def one_step(at, done):
                    slot = lax.rem(done, stages)
                    plgpu.barrier_wait(full.at[slot])
                    plgpu.wgmma(sums, weights_s.at[slot, warpgroup], tokens_s.at[slot].T)
                    plgpu.wgmma_wait(1)  # the step before is done with its slot
                    before = lax.rem(done + stages - 1, stages)
                    pl.when(at > start)(lambda: plgpu.barrier_arrive(free.at[before]))
                    return done + 1

                lax.fori_loop(start, stop, one_step, done)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[lax.rem(done + stop - start - 1, stages)])

            def from_zero(start, stop, done):
                def run(sums):
                    products(sums, start, stop, done)
                    return sums[...]

                return pl.run_scoped(run, plgpu.ACC((ROWS, width), jnp.float32))

            def slot_of_handed(of):
                return (of * cluster + rank) * consumers + warpgroup

            def load_partial():
                wait_for(counters.at[pl.ds(slot_of_handed(worker), 1)], atomic=case.atomic)
                left = handed.at[slot_of_handed(worker)]
                return plgpu.load(left, layout=plgpu.Layout.WGMMA, optimized=False)

            def has_loaded():
                counters[slot_of_handed(worker)] = jnp.int32(0)

            def one_chunk(item, done):
                """The sums of a chunk or of what the stretch has of it, going on from those before."""
                _, _, start, stop, goes_on, _ = item

                def from_handed():
                    if case.atomic:
                        run = functools.partial(products, start=start, stop=stop, done=done)
                        sums = pl.run_state(run)(plgpu.ACC.init(load_partial()))
                    else:
                        sums = load_partial() + from_zero(start, stop, done)  # there sums begin with nothing
                    # It comes last so that the compiler does not join the two ways' ends, where sums are in flight.
                    has_loaded()
                    return sums

                if not case.shares_chunks:
                    return from_zero(start, stop, done)
                return lax.cond(goes_on, from_handed, lambda: from_zero(start, stop, done))

            def folded_chunks(item, done):
                """The sums of a tile's chunks in the stretch, added to those before in order."""
                tile, _, start, stop, goes_on, _ = item
                first, end = line.chunks_between(tile, start, stop)

                def nothing():
                    return plgpu.layout_cast(jnp.zeros((ROWS, width), jnp.float32), plgpu.Layout.WGMMA)

                def fold(chunk, total):
                    begin, end = line.chunk_border(tile, chunk), line.chunk_border(tile, chunk + 1)
                    # Adding to zero changes nothing: sums that began with zero are no negative one.
                    return total + from_zero(begin, end, done + begin - start)

                total = lax.fori_loop(first, end, fold, lax.cond(goes_on, load_partial, nothing))
                pl.when(goes_on)(has_loaded)
                return total

            def multiply(item, done):
                tile, _, start, stop, _, is_left = item
                if loads_early:
                    tokens, _, output, exists = place(case, tile, warpgroup)
                    stored = exists & jnp.logical_not(is_left)
                    pl.when(stored)(lambda: load_residual(0, tokens, output))
                sums = (folded_chunks if case.folds else one_chunk)(item, done)

                def hand_over():
                    after = slot_of_handed(worker + 1)
                    store(handed.at[after], sums)
                    signal(counters.at[pl.ds(after, 1)], atomic=case.atomic)

                def complete():
                    if partials is not None:
                        add_up(item, sums)
                    else:
                        pieces = [sums[:, i * columns : (i + 1) * columns] for i in range(width // columns)]
                        finish(tile, lambda piece: pieces[piece])

                if case.shares_chunks:
                    pl.when(is_left)(hand_over)
                    pl.when(jnp.logical_not(is_left))(complete)
                else:
                    complete()
                return done + (stop - start)

            if case.gated:
                pl.when(warpgroup == 0)(lambda: plgpu.barrier_arrive(up_free))
            walk(line, worker, multiply, jnp.int32(0))
            if case.gated:
                pl.when(warpgroup == 1)(lambda: plgpu.barrier_wait(up_free))
            plgpu.wait_smem_to_gmem(0)

    return dense_matmul
