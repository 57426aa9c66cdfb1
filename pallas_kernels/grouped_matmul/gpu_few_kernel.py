"""The kernels for few tokens: gate and up, down, and one that is both. ``gpu_few_mlp`` says the ideas behind them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul.gpu_few_case import ALIGNED, Case, block_of, output_of
from pallas_kernels.grouped_matmul.gpu_few_tuning import ROWS
from pallas_kernels.mosaic_gpu.primitives import add_and_fetch, fence_async, store


def _ring(case: Case, free: Any) -> Any:
    """For whoever loads: the slot of the step ``at``, once it is free."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def slot_of(at: Any) -> Any:
        slot = lax.rem(at, case.stages)
        pl.when(at >= case.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
        return slot

    return slot_of


def _load_weights(case: Case, source: Any, tile: Any, weights_s: Any, barrier: Any) -> None:
    """Start the copies of a step's matrices; ``source(output, half)`` is where 64 outputs of one are."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    for consumer in range(case.config.consumers):
        for block in range(case.config.blocks):
            output, exists = output_of(case, tile, consumer, block)
            for half in range(case.halves):
                target = weights_s.at[block_of(case, consumer, block, half)]

                @pl.when(exists)
                def _load(output=output, half=half, target=target):
                    plgpu.copy_gmem_to_smem(source(output, half), target, barrier)

                if case.outputs % case.config.outputs:
                    # The arrival that the copy would make.
                    pl.when(jnp.logical_not(exists))(lambda: plgpu.barrier_arrive(barrier))


def _multiply(case: Case, refs: dict[str, Any], first: Any, steps: Any, warpgroup: Any) -> list[jax.Array]:
    """Sums over steps ``first`` to ``first + steps`` of the ring: [64, columns] for each block and half."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    weights_s, tokens_s, full, free = (refs[name] for name in ("weights_s", "tokens_s", "full", "free"))
    products = case.config.blocks * case.halves

    def sums_of(*sums: Any) -> tuple[jax.Array, ...]:
        def one_step(step: Any, _: Any) -> None:
            at = first + step
            slot = lax.rem(at, case.stages)
            plgpu.barrier_wait(full.at[slot])
            tokens = tokens_s.at[slot].T
            for i, each in enumerate(sums):
                plgpu.wgmma(each, weights_s.at[slot, warpgroup * products + i], tokens)
            plgpu.wgmma_wait(products)  # the step before is done with its slot
            before = lax.rem(at + case.stages - 1, case.stages)
            pl.when(step > 0)(lambda: plgpu.barrier_arrive(free.at[before]))

        lax.fori_loop(0, steps, one_step, None)
        plgpu.wgmma_wait(0)
        last = lax.rem(first + steps + case.stages - 1, case.stages)
        pl.when(steps > 0)(lambda: plgpu.barrier_arrive(free.at[last]))
        return tuple(each[...] for each in sums)

    room = [plgpu.ACC((ROWS, case.columns), jnp.float32)] * products
    return list(pl.run_scoped(sums_of, *room))


def _drain(case: Case, free: Any, done: Any) -> None:
    """Wait until nobody will arrive any more."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    for slot in range(case.stages):
        pl.when(done > slot)(lambda slot=slot: plgpu.barrier_wait(free.at[slot]))


class _Phase:
    """Refs and positions that the loops of a kernel share."""

    def __init__(self, case: Case, used: Any, up_to: Any, refs: dict[str, Any]) -> None:
        self.case, self.used, self.refs = case, used, refs
        self.cta, self.warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        self.count = up_to[case.num_experts - 1]

    def inner_of(self, step: Any) -> Any:
        return pl.ds(pl.multiple_of(step * self.case.step, self.case.step), self.case.step)

    def rows_of(self, place: Any) -> Any:
        """The hidden values of an expert in use."""
        return pl.ds(pl.multiple_of(place * self.case.columns, ALIGNED), self.case.columns)


class _GateUp(_Phase):
    """Items are experts in use by tiles of their outputs; a CTA has every ``num_ctas``-th."""

    @property
    def num_own(self) -> Any:
        work = self.count * self.case.output_tiles
        return pl.cdiv(jnp.maximum(work - self.cta, 0), self.case.num_ctas)

    @property
    def num_steps(self) -> Any:
        """Of the CTA."""
        return self.num_own * self.case.num_steps

    def item(self, i: Any) -> tuple[Any, Any]:
        """The CTA's i-th item: place among the experts in use, and tile."""
        index = self.cta + i * self.case.num_ctas
        return lax.div(index, self.case.output_tiles), lax.rem(index, self.case.output_tiles)

    def load(self, x: Any, gate_up: Any) -> None:
        """The loading warpgroup's part."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        case, refs, slot_of = self.case, self.refs, _ring(self.case, self.refs["free"])

        def one_item(i: Any, _: Any) -> None:
            place, tile = self.item(i)
            expert = self.used[place]

            def one_step(step: Any, _: Any) -> None:
                slot, inner = slot_of(i * case.num_steps + step), self.inner_of(step)
                full = refs["full"].at[slot]
                plgpu.copy_gmem_to_smem(x.at[:, inner], refs["tokens_s"].at[slot], full)

                def source(output: Any, half: int) -> Any:
                    return gate_up.at[expert, half, pl.ds(output, ROWS), inner]

                _load_weights(case, source, tile, refs["weights_s"].at[slot], full)

            lax.fori_loop(0, case.num_steps, one_step, None)

        lax.fori_loop(0, self.num_own, one_item, None)

    def multiply(self, weights: Any, out: Any, dtype: Any) -> None:
        """The multiplying warpgroups' part."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        case, refs, warpgroup = self.case, self.refs, self.warpgroup
        layout, columns = plgpu.Layout.WGMMA.reduce(0), pl.ds(0, case.columns)

        def one_item(i: Any, _: Any) -> None:
            place, tile = self.item(i)
            scale = plgpu.load(weights.at[self.used[place], columns], layout=layout, optimized=False)
            sums = _multiply(case, refs, i * case.num_steps, case.num_steps, warpgroup)
            for block in range(case.config.blocks):
                output, exists = output_of(case, tile, warpgroup, block)
                gate, up = sums[2 * block], sums[2 * block + 1]
                value = gate / (1.0 + jnp.exp(-gate)) * up * lax.broadcast_in_dim(scale, gate.shape, [1])

                @pl.when(exists)
                def _store(value=value, output=output):
                    mine = refs["out_s"].at[warpgroup]
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the one before has left
                    mine.T[...] = value.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(mine, out.at[self.rows_of(place), pl.ds(output, ROWS)])

        lax.fori_loop(0, self.num_own, one_item, None)
        plgpu.wait_smem_to_gmem(0)


class _Down(_Phase):
    """A CTA has a tile of outputs and a part of all steps; ``before`` steps went through the ring already."""

    def __init__(self, case: Case, used: Any, up_to: Any, refs: dict[str, Any], before: Any) -> None:
        super().__init__(case, used, up_to, refs)
        self.before = before
        self.tile, self.part = lax.rem(self.cta, case.output_tiles), lax.div(self.cta, case.output_tiles)
        total = self.count * case.num_steps
        self.first = lax.div(total * self.part, case.splits)
        self.last = lax.div(total * (self.part + 1), case.splits)

    @property
    def num_steps(self) -> Any:
        """Of the CTA: none, where there are more of them than parts and tiles."""
        return jnp.where(self.part < self.case.splits, self.last - self.first, 0)

    def load(self, hidden: Any, down: Any, wait: Any = None) -> None:
        """The loading warpgroup's part; ``wait`` returns when the hidden values are there."""
        slot_of, num_steps = _ring(self.case, self.refs["free"]), self.num_steps

        def weights(at: Any) -> Any:
            slot = slot_of(self.before + at)
            place, step = self._at(at)
            expert, inner = self.used[place], self.inner_of(step)

            def source(output: Any, half: int) -> Any:
                return down.at[expert, pl.ds(output, ROWS), inner]

            _load_weights(
                self.case, source, self.tile, self.refs["weights_s"].at[slot], self.refs["full"].at[slot]
            )

        ahead = 0
        if wait is not None:
            # Matrices may come before there is anything to multiply them by.
            ahead = jnp.minimum(num_steps, self.case.stages)
            lax.fori_loop(0, ahead, lambda at, _: weights(at), None)
            wait()
            lax.fori_loop(0, ahead, lambda at, _: self._load_hidden(hidden, at), None)

        def both(at: Any, _: Any) -> None:
            weights(at)
            self._load_hidden(hidden, at)

        lax.fori_loop(ahead, num_steps, both, None)

    def _at(self, at: Any) -> tuple[Any, Any]:
        """Place among the experts in use and step of the CTA's step ``at``."""
        return lax.div(self.first + at, self.case.num_steps), lax.rem(self.first + at, self.case.num_steps)

    def _load_hidden(self, hidden: Any, at: Any) -> None:
        from jax.experimental.pallas import mosaic_gpu as plgpu

        slot = lax.rem(self.before + at, self.case.stages)
        place, step = self._at(at)
        source = hidden.at[self.rows_of(place), self.inner_of(step)]
        plgpu.copy_gmem_to_smem(source, self.refs["tokens_s"].at[slot], self.refs["full"].at[slot])

    def multiply(self, out: Any) -> None:
        """The multiplying warpgroups' part."""
        from jax.experimental.pallas import mosaic_gpu as plgpu

        sums = _multiply(self.case, self.refs, self.before, self.num_steps, self.warpgroup)
        for block, value in enumerate(sums):
            output, exists = output_of(self.case, self.tile, self.warpgroup, block)

            @pl.when(exists & (self.part < self.case.splits))
            def _store(value=value, output=output):
                store(
                    out.at[self.part, :, pl.ds(output, ROWS)].T,
                    plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED),
                )


def gate_up_body(case: Case, dtype: Any) -> Any:
    def experts_gate_up(used, up_to, x, weights, gate_up, out, **refs):
        phase = _GateUp(case, used, up_to, refs)

        @pl.when(phase.warpgroup == case.config.consumers)
        def _producer():
            phase.load(x, gate_up)
            _drain(case, refs["free"], phase.num_steps)

        pl.when(phase.warpgroup < case.config.consumers)(lambda: phase.multiply(weights, out, dtype))

    return experts_gate_up


def down_body(case: Case) -> Any:
    def experts_down(used, up_to, hidden, down, out, **refs):
        phase = _Down(case, used, up_to, refs, 0)

        @pl.when(phase.warpgroup == case.config.consumers)
        def _producer():
            phase.load(hidden, down)
            _drain(case, refs["free"], phase.num_steps)

        pl.when(phase.warpgroup < case.config.consumers)(lambda: phase.multiply(out))

    return experts_down


def both_body(first: Case, second: Case, dtype: Any, alone: bool) -> Any:
    """One kernel, all of whose CTAs run at the same time: the second part's matrices come while the first part ends.

    Args:
        first, second: the parts.
        dtype: of hidden values.
        alone: interpreted, as a single CTA, whose warpgroups wait for one another at a barrier.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    consumers = first.config.consumers

    def experts_both(used, up_to, x, weights, gate_up, down, arrived, hidden, out, *, count_s, ready, **refs):
        one = _GateUp(first, used, up_to, refs)
        two = _Down(second, used, up_to, refs, one.num_steps)
        counter, count_s = arrived.at[pl.ds(0, 1)], count_s.at[one.warpgroup]

        def announce():
            """Tell everybody that this warpgroup's hidden values are there."""
            if alone:
                plgpu.barrier_arrive(ready)
                return
            fence_async()
            add_and_fetch(counter, count_s, jnp.int32(1), atomic=True)

        def wait():
            """Until all have announced theirs."""
            if alone:
                plgpu.barrier_wait(ready)
                return

            def look(_):
                return add_and_fetch(counter, count_s, jnp.int32(0), atomic=True)

            lax.while_loop(lambda seen: seen < consumers * first.grid, look, look(0))
            fence_async()

        # First those that multiply: ptxas takes what follows a loop of waiting for divergent, and does a product at a
        # time there.
        @pl.when(one.warpgroup < consumers)
        def _consumer():
            one.multiply(weights, hidden, dtype)
            announce()
            two.multiply(out)

        @pl.when(one.warpgroup == consumers)
        def _producer():
            one.load(x, gate_up)
            two.load(hidden, down, wait)
            _drain(second, refs["free"], one.num_steps + two.num_steps)

    return experts_both
