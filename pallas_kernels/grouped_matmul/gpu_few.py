"""Experts of few tokens on Hopper (Mosaic GPU): every token through every expert in use, in two kernels.

Central ideas:

* With few tokens the time is that of reading the weights. So all tokens are the columns of every product, whether they
  chose the expert or not: nothing is sorted, gathered or scattered. A token's weight at an expert, zero where it did
  not choose it, scales the expert's hidden values.
* The first kernel computes gate and up of the same outputs in one warpgroup, which leaves silu(gate) * up * weight.
* The second one's contracted dimension is that of all experts in use, one after another. It is cut into equal parts,
  as many as there are multiprocessors for; their sums are added by whoever adds the residual.

Sums depend on which experts the batch uses: not for batch-invariant engines.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu  # stored programs need its runtime, and tracing nothing imports nothing
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul import gpu_choose
from pallas_kernels.grouped_matmul.few import Chosen, Rule
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.ragged_paged_attention.gpu_launch import launch
from pallas_kernels.ragged_paged_attention.gpu_primitives import add_and_fetch, fence_async, store

ROWS = 64
"""Outputs of one instruction, and the elements of a swizzled line."""
ALIGNED = 8
"""Tokens come in such portions."""
SHARED_MEMORY = 232_448
"""Bytes of one CTA."""
DTYPES = ("bfloat16", "float16")
MOST_TOKENS = 256
"""That one instruction has columns for."""


@dataclass(frozen=True)
class FewConfig:
    """What is tuned of one of the two kernels.

    Args:
        consumers: multiplying warpgroups, 1 or 2.
        blocks: of 64 outputs (the first kernel: 64 of gate and 64 of up) that each of them computes of a tile.
        step: contracted elements loaded at a time, 64 or a multiple; 64 where it does not divide them.
        stages: steps in flight, 2 or more; as many as fit into the shared memory where there is no room for them.
    """

    consumers: int = 1
    blocks: int = 1
    step: int = 128
    stages: int = 6

    def __post_init__(self) -> None:
        if self.consumers not in (1, 2) or self.blocks < 1 or self.step % ROWS or self.stages < 2:
            raise ValueError(
                f"{self}: consumers are 1 or 2, blocks 1 or more, step a multiple of 64, stages 2 or more"
            )

    @property
    def outputs(self) -> int:
        """Of a tile, of which the first kernel computes gate and up."""
        return self.consumers * self.blocks * ROWS


@dataclass(frozen=True)
class _Case:
    """What one compiled kernel is made for: ``halves`` matrices (gate and up, or one) of [outputs, inner]."""

    config: FewConfig
    columns: int
    num_experts: int
    halves: int
    outputs: int
    inner: int
    num_ctas: int

    @property
    def step(self) -> int:
        return self.config.step if self.inner % self.config.step == 0 else ROWS

    @property
    def num_steps(self) -> int:
        return self.inner // self.step

    @property
    def output_tiles(self) -> int:
        return pl.cdiv(self.outputs, self.config.outputs)

    @property
    def stages(self) -> int:
        """That fit."""
        result = self.config.consumers * self.columns * ROWS * 2 + 4096
        step = (self.halves * self.config.outputs + self.columns) * self.step * 2
        stages = min(self.config.stages * self.config.step // self.step, (SHARED_MEMORY - result) // step)
        if stages < 2:
            raise ValueError(f"{self.config} does not fit into shared memory with {self.columns} tokens")
        return stages

    @property
    def splits(self) -> int:
        """Parts of the second kernel's contracted dimension."""
        return max(1, self.num_ctas // self.output_tiles)

    @property
    def grid(self) -> int:
        """CTAs: all may run at the same time."""
        return max(self.num_ctas, self.output_tiles) if self.halves == 1 else self.num_ctas


def gated_mlp(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    chosen: Chosen,
    *,
    configs: tuple[FewConfig, FewConfig] | FewConfig,
    num_sms: int,
    interpret: Any = None,
) -> jax.Array:
    """float32 [T, M]; as ``few.gated_mlp``.

    Args:
        x: [T, M], bfloat16 or float16.
        gate_up: [E, 2, F, M] of the same type; F and M multiples of 64.
        down: [E, M, F].
        chosen: the experts.
        configs: of the two kernels, or of one that is both.
        num_sms: multiprocessors to fill.
    """
    num_tokens = x.shape[0]
    columns = -(-num_tokens // ALIGNED) * ALIGNED
    if columns != num_tokens:
        x = jnp.pad(x, ((0, columns - num_tokens), (0, 0)))
    if isinstance(configs, FewConfig):
        parts = _run_both(x, gate_up, down, chosen, configs, columns, num_sms, interpret)
    else:
        parts = _run_each(x, gate_up, down, chosen, configs, columns, num_sms, interpret)
    # Added one by one, not as a reduction: so XLA makes it a part of what comes next.
    return functools.reduce(jnp.add, [part[:num_tokens] for part in parts])


def _run_each(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, chosen: Chosen, configs: tuple[FewConfig, FewConfig],
    columns: int, num_sms: int, interpret: Any,
) -> jax.Array:  # fmt: skip
    """float32 [parts, C, M]."""
    num_experts, _, ffn, hidden_size = gate_up.shape
    first = _Case(configs[0], columns, num_experts, 2, ffn, hidden_size, num_sms)
    second = _Case(configs[1], columns, num_experts, 1, hidden_size, ffn, num_sms)
    plan = [chosen.used, chosen.up_to]
    body, out_type = (
        _gate_up_body(first, x.dtype),
        jax.ShapeDtypeStruct((num_experts * columns, ffn), x.dtype),
    )
    [hidden] = _run(
        first, "experts_gate_up", body, [*plan, x, chosen.weights, gate_up], [], (out_type,), interpret
    )
    body, out_type = (
        _down_body(second),
        jax.ShapeDtypeStruct((second.splits, columns, hidden_size), jnp.float32),
    )
    [parts] = _run(second, "experts_down", body, [*plan, hidden, down], [], (out_type,), interpret)
    return parts


def _run_both(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, chosen: Chosen, config: FewConfig,
    columns: int, num_sms: int, interpret: Any,
) -> jax.Array:  # fmt: skip
    """float32 [parts, C, M]."""
    num_experts, _, ffn, hidden_size = gate_up.shape
    first = _Case(config, columns, num_experts, 2, ffn, hidden_size, num_sms)
    # As many products: the same shared memory and barriers serve both parts.
    config = replace(config, blocks=2 * config.blocks)
    second = _Case(config, columns, num_experts, 1, hidden_size, ffn, num_sms)
    if (first.step, first.stages) != (second.step, second.stages):
        raise ValueError(
            f"a step of {config.step} does not divide {hidden_size} and {ffn}: take a smaller one"
        )
    if second.output_tiles > num_sms:
        raise ValueError(
            f"{second.output_tiles} tiles of outputs cannot all run on {num_sms} multiprocessors"
        )
    operands = [chosen.used, chosen.up_to, x, chosen.weights, gate_up, down]
    out_types = (
        jax.ShapeDtypeStruct((num_experts * columns, ffn), x.dtype),
        jax.ShapeDtypeStruct((second.splits, columns, hidden_size), jnp.float32),
    )
    body = _both_body(first, second, x.dtype, alone=interpret is not None)
    arrived = jax.new_ref(chosen.zero)
    _, parts = _run(first, "experts_both", body, operands, [arrived], out_types, interpret)
    return parts


def _run(
    case: _Case, name: str, body: Any, operands: list[jax.Array], refs: list[Any],
    out_types: tuple[jax.ShapeDtypeStruct, ...], interpret: Any,
) -> tuple[jax.Array, ...]:  # fmt: skip
    from jax.experimental.pallas import mosaic_gpu as plgpu

    dtype, warpgroups = operands[2].dtype, case.config.consumers + 1
    counts = {}
    if refs:
        counts = dict(
            count_s=plgpu.SMEM((warpgroups, 1), jnp.int32), ready=plgpu.Barrier(num_arrivals=warpgroups - 1)
        )
    build = functools.partial(
        plgpu.kernel,
        body,
        grid=(case.grid,),
        grid_names=("cta",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types={**_scratch(case, dtype), **counts},
        kernel_name=name,
        interpret=interpret,
    )
    return launch(
        lambda types: build(out_type=types), (name, case, dtype.name), operands, refs, out_types,
        batched=[], interpret=interpret,
    )  # fmt: skip


def _scratch(case: _Case, dtype: Any) -> dict[str, Any]:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    config, step, stages = case.config, case.step, case.stages
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    blocks = config.consumers * config.blocks * case.halves
    scratch = dict(
        weights_s=plgpu.SMEM((stages, blocks, ROWS, step), dtype, transforms=tiled),
        tokens_s=plgpu.SMEM((stages, case.columns, step), dtype, transforms=tiled),
        full=plgpu.Barrier(num_arrivals=blocks + 1, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=config.consumers, num_barriers=stages),
    )
    if case.halves == 2:
        scratch["out_s"] = plgpu.SMEM((config.consumers, case.columns, ROWS), dtype, transforms=tiled)
    return scratch


def _block_of(case: _Case, consumer: Any, block: int, half: int) -> Any:
    """Its number in a step's shared memory."""
    return (consumer * case.config.blocks + block) * case.halves + half


def _output_of(case: _Case, tile: Any, consumer: Any, block: int) -> tuple[Any, Any]:
    """Its first output, and whether there is such a one."""
    first = (tile * case.config.consumers + consumer) * (case.config.blocks * ROWS) + block * ROWS
    return pl.multiple_of(first, ROWS), first < case.outputs


def _ring(case: _Case, free: Any) -> Any:
    """For whoever loads: the slot of the step ``at``, once it is free."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def slot_of(at: Any) -> Any:
        slot = lax.rem(at, case.stages)
        pl.when(at >= case.stages)(lambda: plgpu.barrier_wait(free.at[slot]))
        return slot

    return slot_of


def _load_weights(case: _Case, source: Any, tile: Any, weights_s: Any, barrier: Any) -> None:
    """Start the copies of a step's matrices; ``source(output, half)`` is where 64 outputs of one are."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    for consumer in range(case.config.consumers):
        for block in range(case.config.blocks):
            output, exists = _output_of(case, tile, consumer, block)
            for half in range(case.halves):
                target = weights_s.at[_block_of(case, consumer, block, half)]

                @pl.when(exists)
                def _load(output=output, half=half, target=target):
                    plgpu.copy_gmem_to_smem(source(output, half), target, barrier)

                if case.outputs % case.config.outputs:
                    # The arrival that the copy would make.
                    pl.when(jnp.logical_not(exists))(lambda: plgpu.barrier_arrive(barrier))


def _multiply(case: _Case, refs: dict[str, Any], first: Any, steps: Any, warpgroup: Any) -> list[jax.Array]:
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


def _drain(case: _Case, free: Any, done: Any) -> None:
    """Wait until nobody will arrive any more."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    for slot in range(case.stages):
        pl.when(done > slot)(lambda slot=slot: plgpu.barrier_wait(free.at[slot]))


class _Phase:
    """Refs and positions that the loops of a kernel share."""

    def __init__(self, case: _Case, used: Any, up_to: Any, refs: dict[str, Any]) -> None:
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
                output, exists = _output_of(case, tile, warpgroup, block)
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

    def __init__(self, case: _Case, used: Any, up_to: Any, refs: dict[str, Any], before: Any) -> None:
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
            output, exists = _output_of(self.case, self.tile, self.warpgroup, block)

            @pl.when(exists & (self.part < self.case.splits))
            def _store(value=value, output=output):
                store(
                    out.at[self.part, :, pl.ds(output, ROWS)].T,
                    plgpu.layout_cast(value, plgpu.Layout.WGMMA_TRANSPOSED),
                )


def _gate_up_body(case: _Case, dtype: Any) -> Any:
    def experts_gate_up(used, up_to, x, weights, gate_up, out, **refs):
        phase = _GateUp(case, used, up_to, refs)

        @pl.when(phase.warpgroup == case.config.consumers)
        def _producer():
            phase.load(x, gate_up)
            _drain(case, refs["free"], phase.num_steps)

        pl.when(phase.warpgroup < case.config.consumers)(lambda: phase.multiply(weights, out, dtype))

    return experts_gate_up


def _down_body(case: _Case) -> Any:
    def experts_down(used, up_to, hidden, down, out, **refs):
        phase = _Down(case, used, up_to, refs, 0)

        @pl.when(phase.warpgroup == case.config.consumers)
        def _producer():
            phase.load(hidden, down)
            _drain(case, refs["free"], phase.num_steps)

        pl.when(phase.warpgroup < case.config.consumers)(lambda: phase.multiply(out))

    return experts_down


def _both_body(first: _Case, second: _Case, dtype: Any, alone: bool) -> Any:
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


@functools.cache
def _table() -> tuple[tuple[int, tuple[FewConfig, FewConfig] | FewConfig], ...]:
    """The tuning table's entries: most tokens, and configurations."""
    file = resources.files("pallas_kernels.grouped_matmul") / "gpu_tuning.json"

    def configs(entry: dict[str, Any]) -> tuple[FewConfig, FewConfig] | FewConfig:
        if "both" in entry:
            return FewConfig(**entry["both"])
        return FewConfig(**entry["gate_up"]), FewConfig(**entry["down"])

    return tuple((entry["tokens"], configs(entry)) for entry in json.loads(file.read_text())["few"])


@dataclass(frozen=True)
class GpuFewTokens:
    """Both kernels; see ``dispatch.FewTokens``. Static in the compiled step.

    Args:
        num_sms: multiprocessors to fill; None asks the first device.
        configs: of the two kernels or the one that is both, instead of the tuning table's; then any number of tokens
            that fits is taken.
        interpret: ``plgpu.InterpretGPUParams`` runs them on a CPU.
    """

    num_sms: int | None = None
    configs: tuple[FewConfig, FewConfig] | FewConfig | None = None
    interpret: Any = None

    def why_not(self, num_tokens: int, ffn_size: int, hidden_size: int, dtype: Any) -> str | None:
        """Why so many tokens are not taken, None when they are."""
        name = jnp.dtype(dtype).name
        if name not in DTYPES:
            return f"the Hopper kernels for few tokens take {' or '.join(DTYPES)}, not {name}"
        if ffn_size % ROWS or hidden_size % ROWS:
            return f"the Hopper kernels take experts of multiples of {ROWS}, not {ffn_size} x {hidden_size}"
        most = MOST_TOKENS if self.configs is not None else _table()[-1][0]
        return f"{num_tokens} tokens are not few: more than {most}" if num_tokens > most else None

    def why_not_choose(self, num_tokens: int, num_experts: int) -> str | None:
        """Why the kernel cannot choose, None when it can."""
        return gpu_choose.supported(num_tokens, num_experts)

    def routed(
        self,
        x: jax.Array,
        logits: jax.Array,
        live: jax.Array,
        rule: Rule,
        gate_up: jax.Array,
        down: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """(float32 [T, M], int32 [E]), as ``dispatch.FewTokens`` says, in three kernels."""
        chosen, load, rows = gpu_choose.choose(logits, live, x, rule, interpret=self.interpret)
        return self(rows, gate_up, down, chosen)[: x.shape[0]], load

    def __call__(self, x: jax.Array, gate_up: jax.Array, down: jax.Array, chosen: Chosen) -> jax.Array:
        """float32 [T, M].

        Raises:
            ValueError: what ``why_not`` says, or operands of several types.
        """
        num_tokens, ffn_size = x.shape[0], gate_up.shape[2]
        if not x.dtype == gate_up.dtype == down.dtype:
            raise ValueError(
                f"tokens and matrices are of one type, not {x.dtype}, {gate_up.dtype} and {down.dtype}"
            )
        if (reason := self.why_not(num_tokens, ffn_size, x.shape[1], x.dtype)) is not None:
            raise ValueError(reason)
        configs = self.configs or next(each for most, each in _table() if num_tokens <= most)
        num_sms = multiprocessors(self.num_sms)
        return _jitted(x, gate_up, down, chosen, configs, num_sms, self.interpret)


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _jitted(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    chosen: Chosen,
    configs: Any,
    num_sms: int,
    interpret: Any,
) -> jax.Array:
    """Traced once for all layers of a step."""
    return gated_mlp(x, gate_up, down, chosen, configs=configs, num_sms=num_sms, interpret=interpret)


__all__ = ["FewConfig", "GpuFewTokens", "gated_mlp"]
