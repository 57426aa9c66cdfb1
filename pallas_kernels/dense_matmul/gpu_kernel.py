"""The dense kernel: what a worker does with its stretch of the line. ``gpu_product`` says the ideas behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dense_matmul.gpu_case import Case
from pallas_kernels.dense_matmul.gpu_flags import signal, store_transposed, wait_for
from pallas_kernels.dense_matmul.gpu_tuning import ALIGNED, ROWS
from pallas_kernels.mosaic_gpu.primitives import add_and_fetch, store

WGMMA = plgpu.Layout.WGMMA


def kernel_body(case: Case, dtype: Any) -> Callable[..., None]:
    """What ``plgpu.kernel`` is given."""

    def dense_matmul(x: Any, weight: Any, *refs: Any, **shared: Any) -> None:
        residual, refs = (refs[0], refs[1:]) if case.has_residual else (None, refs)
        token_tiles, refs = (refs[0][0], refs[1:]) if case.many_tokens else (1, refs)
        counters, out, *refs = refs
        handed, refs = (refs[0], refs[1:]) if case.shares_chunks else (None, refs)
        partials = refs[0] if case.has_partials else None
        operands = Operands(x, weight, counters, out, residual, handed, partials)
        product = Product(case, dtype, operands, Shared(**shared), token_tiles)

        @pl.when(product.warpgroup == case.config.consumers)
        def _producer() -> None:
            if case.config.consumers == 2:
                plgpu.set_max_registers(case.config.producer_registers, action="decrease")
            product.load()

        @pl.when(product.warpgroup < case.config.consumers)
        def _consumer() -> None:
            if case.config.consumers == 2:
                plgpu.set_max_registers(case.config.consumer_registers, action="increase")
            product.multiply()

    return dense_matmul


@dataclass(frozen=True)
class Operands:
    """References to global memory.

    Args:
        x, weight, residual: see ``gpu_product.dense_matmul``.
        counters: flags of handed sums, then counts of finished chunks.
        out: what it returns.
        handed: float32 [workers x CTAs of a cluster x consumers, 64, width]: sums that the worker before left; None
            where no stretch ends inside a chunk.
        partials: float32 [64 outputs x chunks, 64, width]: sums of chunks; None where one chunk is all.
    """

    x: Any
    weight: Any
    counters: Any
    out: Any
    residual: Any
    handed: Any
    partials: Any


@dataclass(frozen=True)
class Shared:
    """References to shared memory and its barriers, which ``gpu_case.scratch`` makes.

    Those from ``up_s`` on are of products with a gate, the last one is of those with a residual.
    """

    weights_s: Any
    tokens_s: Any
    out_s: Any
    full: Any
    free: Any
    count_s: Any
    up_s: Any = None
    up_full: Any = None
    up_free: Any = None
    residual_full: Any = None


class Product:
    """A worker's part of the product, as the kernel is traced.

    Its step ``n`` uses slot ``n % stages`` of the shared memory.

    Args:
        token_tiles: 1, or an int32 that the kernel reads.
    """

    def __init__(self, case: Case, dtype: Any, operands: Operands, shared: Shared, token_tiles: Any) -> None:
        self.case, self.dtype, self.operands, self.shared = case, dtype, operands, shared
        self.token_tiles, self.line = token_tiles, case.line(token_tiles)
        self.width, self.columns, self.stages = case.config.width, case.config.columns, case.stages
        self.worker, self.warpgroup = lax.axis_index("worker"), lax.axis_index("warpgroup")
        self.rank = lax.axis_index("cluster") if case.config.cluster > 1 else 0
        self.loads_early = case.has_residual and self.width == self.columns

    # --- where things are ------------------------------------------------------------------------------------------

    def walk(self, action: Callable[..., Any], carry: Any) -> Any:
        """``action(item, carry)`` for the items of this worker's stretch, the last one first."""
        line = self.line
        begin, end = line.border(self.worker), line.border(self.worker + 1)

        def one_item(state: Any) -> Any:
            stop, carry = state
            tile, chunk, first, last = line.chunk_of(stop - 1)
            start = jnp.maximum(first, begin)
            return start, action((tile, chunk, start, stop, start > first, stop < last), carry)

        return lax.while_loop(lambda state: state[0] > begin, one_item, (end, carry))[1]

    def place(self, tile: Any, consumer: Any) -> Any:
        """First token, first row of the weight, first output of 64, and whether there are such."""
        case = self.case
        block = lax.div(tile, jnp.int32(self.token_tiles))
        tokens = pl.multiple_of((tile - block * self.token_tiles) * self.width, ALIGNED)
        block = block * case.config.cluster + self.rank
        if case.gated:
            output = pl.multiple_of(block * ROWS, ROWS)
            row = output + consumer * (case.outputs // 2)
            return tokens, pl.multiple_of(row, ROWS), output, output < case.outputs // 2
        output = pl.multiple_of((block * case.config.consumers + consumer) * ROWS, ROWS)
        return tokens, output, output, output < case.outputs

    def inner_of(self, tile: Any, at: Any) -> Any:
        first = (at - tile * self.line.steps) * self.case.step
        return pl.ds(pl.multiple_of(first, self.case.step), self.case.step)

    def piece_of(self, array: Any, piece: int, tokens: Any, output: Any) -> Any:
        """The piece's tokens of this consumer's outputs, in global memory: of the results or the residual."""
        return array.at[pl.ds(tokens + piece * self.columns, self.columns), pl.ds(output, ROWS)]

    def slot_of(self, number: Any) -> Any:
        """This consumer's place among all of a tile, for its sums, or of a worker, for those that are handed to it."""
        return (number * self.case.config.cluster + self.rank) * self.case.config.consumers + self.warpgroup

    def counter(self, index: Any) -> Any:
        return self.operands.counters.at[pl.ds(index, 1)]

    def reset(self, index: Any) -> None:
        self.operands.counters[index] = jnp.int32(0)

    # --- the loading warpgroup -------------------------------------------------------------------------------------

    def load(self) -> None:
        """Load all steps, as slots get free, and wait until nobody of the cluster looks at them any more."""
        stages, shared = self.stages, self.shared
        cluster = "cluster" if self.case.config.cluster > 1 else None

        def item_steps(item: Any, done: Any) -> Any:
            tile, _, start, stop, _, _ = item

            def one_step(at: Any, done: Any) -> Any:
                slot = lax.rem(done, stages)
                pl.when(done >= stages)(lambda: plgpu.barrier_wait(shared.free.at[slot]))
                inner = self.inner_of(tile, at)
                self.load_weights(tile, inner, slot)
                tokens = self.operands.x.at[pl.ds(self.place(tile, 0)[0], self.width), inner]
                plgpu.copy_gmem_to_smem(
                    tokens, shared.tokens_s.at[slot], shared.full.at[slot], collective_axes=cluster
                )
                return done + 1

            return lax.fori_loop(start, stop, one_step, done)

        done = self.walk(item_steps, jnp.int32(0))
        # Others of the cluster may still send to this CTA, or look at its barriers.
        for slot in range(stages):
            pl.when(done > slot)(functools.partial(plgpu.barrier_wait, shared.free.at[slot]))

    def load_weights(self, tile: Any, inner: Any, slot: Any) -> None:
        for consumer in range(self.case.config.consumers):
            _, row, _, exists = self.place(tile, consumer)
            full = self.shared.full.at[slot]

            @pl.when(exists)
            def _load(consumer: int = consumer, row: Any = row, full: Any = full) -> None:
                weights = self.operands.weight.at[pl.ds(row, ROWS), inner]
                plgpu.copy_gmem_to_smem(weights, self.shared.weights_s.at[slot, consumer], full)

            # The arrival that the copy would make.
            pl.when(jnp.logical_not(exists))(functools.partial(plgpu.barrier_arrive, full))

    # --- a multiplying warpgroup -----------------------------------------------------------------------------------

    def multiply(self) -> None:
        """Multiply all steps, and store what that makes whole."""
        case, shared = self.case, self.shared
        if case.gated:
            pl.when(self.warpgroup == 0)(lambda: plgpu.barrier_arrive(shared.up_free))
        self.walk(self._one_item, jnp.int32(0))
        if case.gated:
            pl.when(self.warpgroup == 1)(lambda: plgpu.barrier_wait(shared.up_free))
        plgpu.wait_smem_to_gmem(0)

    def _one_item(self, item: Any, done: Any) -> Any:
        tile, _, start, stop, _, is_left = item
        if self.loads_early:
            tokens, _, output, exists = self.place(tile, self.warpgroup)
            stored = exists & jnp.logical_not(is_left)
            pl.when(stored)(lambda: self._load_residual(0, tokens, output))
        sums = (self._folded_chunks if self.case.folds else self._one_chunk)(item, done)

        def hand_over() -> None:
            after = self.slot_of(self.worker + 1)
            store(self.operands.handed.at[after], sums)
            signal(self.counter(after), atomic=self.case.atomic)

        def complete() -> None:
            if self.operands.partials is not None:
                self._add_up(item, sums)
                return
            columns = self.columns
            pieces = [sums[:, i * columns : (i + 1) * columns] for i in range(self.width // columns)]
            self._finish(tile, lambda piece: pieces[piece])

        if self.case.shares_chunks:
            pl.when(is_left)(hand_over)
            pl.when(jnp.logical_not(is_left))(complete)
        else:
            complete()
        return done + (stop - start)

    def _one_chunk(self, item: Any, done: Any) -> Any:
        """The sums of a chunk or of what the stretch has of it, going on from those before."""
        _, _, start, stop, goes_on, _ = item

        def from_handed() -> Any:
            if self.case.atomic:
                run = functools.partial(self._steps, start=start, stop=stop, done=done)
                sums = pl.run_state(run)(plgpu.ACC.init(self._load_handed()))
            else:
                # There sums begin with nothing.
                sums = self._load_handed() + self._from_zero(start, stop, done)
            # It comes last so that the compiler does not join the two ways' ends, where sums are in flight.
            self.reset(self.slot_of(self.worker))
            return sums

        if not self.case.shares_chunks:
            return self._from_zero(start, stop, done)
        return lax.cond(goes_on, from_handed, lambda: self._from_zero(start, stop, done))

    def _folded_chunks(self, item: Any, done: Any) -> Any:
        """The sums of a tile's chunks in the stretch, added to those before in order."""
        tile, _, start, stop, goes_on, _ = item
        line = self.line
        first, end = line.chunks_between(tile, start, stop)

        def nothing() -> Any:
            return plgpu.layout_cast(jnp.zeros((ROWS, self.width), jnp.float32), WGMMA)

        def fold(chunk: Any, total: Any) -> Any:
            begin, end = line.chunk_border(tile, chunk), line.chunk_border(tile, chunk + 1)
            # Adding to zero changes nothing: sums that began with zero are no negative one.
            return total + self._from_zero(begin, end, done + begin - start)

        total = lax.fori_loop(first, end, fold, lax.cond(goes_on, self._load_handed, nothing))
        pl.when(goes_on)(lambda: self.reset(self.slot_of(self.worker)))
        return total

    def _load_handed(self) -> Any:
        slot = self.slot_of(self.worker)
        wait_for(self.counter(slot), atomic=self.case.atomic)
        return plgpu.load(self.operands.handed.at[slot], layout=WGMMA, optimized=False)

    def _from_zero(self, start: Any, stop: Any, done: Any) -> Any:
        def run(sums: Any) -> Any:
            self._steps(sums, start, stop, done)
            return sums[...]

        return pl.run_scoped(run, plgpu.ACC((ROWS, self.width), jnp.float32))

    def _steps(self, sums: Any, start: Any, stop: Any, done: Any) -> None:
        stages, shared = self.stages, self.shared

        def one_step(at: Any, done: Any) -> Any:
            slot = lax.rem(done, stages)
            plgpu.barrier_wait(shared.full.at[slot])
            plgpu.wgmma(sums, shared.weights_s.at[slot, self.warpgroup], shared.tokens_s.at[slot].T)
            plgpu.wgmma_wait(1)  # the step before is done with its slot
            before = lax.rem(done + stages - 1, stages)
            pl.when(at > start)(lambda: plgpu.barrier_arrive(shared.free.at[before]))
            return done + 1

        lax.fori_loop(start, stop, one_step, done)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(shared.free.at[lax.rem(done + stop - start - 1, stages)])

    def _add_up(self, item: Any, sums: Any) -> None:
        """Leave a chunk's sums; whoever is the last of a tile's chunks adds them up in order."""
        tile, chunk = item[:2]
        case, partials, columns = self.case, self.operands.partials, self.columns
        slot = self.slot_of(tile)
        store(partials.at[slot * case.chunks + chunk], sums)
        counter = case.num_handed + slot
        before = add_and_fetch(
            self.counter(counter), self.shared.count_s.at[self.warpgroup], jnp.int32(1), atomic=case.atomic
        )
        if self.loads_early:
            unused = self.place(tile, self.warpgroup)[3] & (before != case.chunks - 1)
            pl.when(unused)(lambda: plgpu.barrier_wait(self.shared.residual_full.at[self.warpgroup]))

        @pl.when(before == case.chunks - 1)
        def _merge() -> None:
            self.reset(counter)

            def load_partial(chunk: int, piece: int) -> Any:
                part = partials.at[slot * case.chunks + chunk, :, pl.ds(piece * columns, columns)]
                return plgpu.load(part, layout=WGMMA, optimized=False)

            def value_of(piece: int) -> Any:
                parts = [load_partial(chunk, piece) for chunk in range(case.chunks)]
                return functools.reduce(lambda a, b: a + b, parts)

            self._finish(tile, value_of)

    # --- what follows a product ------------------------------------------------------------------------------------

    def _finish(self, tile: Any, value_of: Callable[[int], Any]) -> None:
        """``value_of(piece)`` are a tile's sums, [64, columns]."""
        tokens, _, output, exists = self.place(tile, self.warpgroup)

        @pl.when(exists)
        def _store() -> None:
            for piece in range(self.width // self.columns):
                store_one = self._store_gated if self.case.gated else self._store_piece
                store_one(value_of(piece), piece, tokens, output)

    def _load_residual(self, piece: int, tokens: Any, output: Any) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the one before has left
        residual = self.piece_of(self.operands.residual, piece, tokens, output)
        plgpu.copy_gmem_to_smem(
            residual, self.shared.out_s.at[self.warpgroup], self.shared.residual_full.at[self.warpgroup]
        )

    def _store_piece(self, value: Any, piece: int, tokens: Any, output: Any) -> None:
        case, ours = self.case, self.shared.out_s.at[0 if self.case.gated else self.warpgroup]

        def target() -> Any:
            return self.piece_of(self.operands.out, piece, tokens, output)

        if case.out_dtype == "float32":
            store_transposed(target(), value, direct=case.atomic)
            return
        if case.has_residual:
            if not self.loads_early:
                self._load_residual(piece, tokens, output)
            plgpu.barrier_wait(self.shared.residual_full.at[self.warpgroup])
            before = plgpu.load(ours.T, layout=WGMMA, optimized=False)
            value = before.astype(jnp.float32) + value  # rounded once, as cuBLAS does
        else:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        ours.T[...] = value.astype(self.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(ours, target())

    def _store_gated(self, value: Any, piece: int, tokens: Any, output: Any) -> None:
        """The second consumer has the other half: it hands it over in shared memory."""
        shared = self.shared

        @pl.when(self.warpgroup == 1)
        def _up() -> None:
            plgpu.barrier_wait(shared.up_free)
            store(shared.up_s, value.astype(self.dtype))
            plgpu.barrier_arrive(shared.up_full)

        @pl.when(self.warpgroup == 0)
        def _gate() -> None:
            gate = value.astype(self.dtype).astype(jnp.float32)
            plgpu.barrier_wait(shared.up_full)
            up = plgpu.load(shared.up_s, layout=WGMMA, optimized=False)
            # In XLA's order: there may be a kernel of its for other numbers of rows.
            product = gate * (1.0 / (jnp.exp(-gate) + 1.0)) * up.astype(jnp.float32)
            plgpu.barrier_arrive(shared.up_free)
            self._store_piece(product, piece, tokens, output)
