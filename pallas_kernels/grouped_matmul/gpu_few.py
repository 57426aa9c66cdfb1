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
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu  # stored programs need its runtime, and tracing nothing imports nothing
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul import gpu_choose
from pallas_kernels.grouped_matmul.few import Chosen, Rule
from pallas_kernels.ragged_paged_attention.gpu_launch import launch
from pallas_kernels.ragged_paged_attention.gpu_primitives import store

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
        return self.num_ctas if self.halves == 2 else self.output_tiles * self.splits


def gated_mlp(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    chosen: Chosen,
    *,
    configs: tuple[FewConfig, FewConfig],
    num_sms: int,
    interpret: Any = None,
) -> jax.Array:
    """float32 [T, M]; as ``few.gated_mlp``.

    Args:
        x: [T, M], bfloat16 or float16.
        gate_up: [E, 2, F, M] of the same type; F and M multiples of 64.
        down: [E, M, F].
        chosen: the experts.
        configs: of the two kernels.
        num_sms: multiprocessors to fill.
    """
    (num_tokens, hidden_size), (num_experts, _, ffn, _) = x.shape, gate_up.shape
    columns = -(-num_tokens // ALIGNED) * ALIGNED
    if columns != num_tokens:
        x = jnp.pad(x, ((0, columns - num_tokens), (0, 0)))
    first = _Case(configs[0], columns, num_experts, 2, ffn, hidden_size, num_sms)
    second = _Case(configs[1], columns, num_experts, 1, hidden_size, ffn, num_sms)
    out_type = jax.ShapeDtypeStruct((num_experts * columns, ffn), x.dtype)
    plan = [chosen.used, chosen.up_to]
    operands = [*plan, x, chosen.weights, gate_up]
    hidden = _run(first, "experts_gate_up", _gate_up_body, operands, out_type, interpret)
    out_type = jax.ShapeDtypeStruct((second.splits, hidden_size, columns), jnp.float32)
    parts = _run(second, "experts_down", _down_body, [*plan, hidden, down], out_type, interpret)
    # Added one by one, not as a reduction: so XLA makes it a part of what comes next.
    total = functools.reduce(jnp.add, [parts[i, :, :num_tokens] for i in range(second.splits)])
    return total.T


def _run(
    case: _Case,
    name: str,
    body: Any,
    operands: list[jax.Array],
    out_type: jax.ShapeDtypeStruct,
    interpret: Any,
) -> jax.Array:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    dtype = operands[2].dtype
    build = functools.partial(
        plgpu.kernel,
        body(case, dtype),
        grid=(case.grid,),
        grid_names=("cta",),
        num_threads=case.config.consumers + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(case, dtype),
        kernel_name=name,
        interpret=interpret,
    )
    [out] = launch(
        lambda types: build(out_type=types), (name, case, dtype.name), operands, [], (out_type,),
        batched=[], interpret=interpret,
    )  # fmt: skip
    return out


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


def _multiply(case: _Case, refs: Any, first: Any, steps: Any, warpgroup: Any) -> list[jax.Array]:
    """Sums over steps ``first`` to ``first + steps`` of the ring: [64, columns] for each block and half."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    weights_s, tokens_s, full, free = refs
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


def _gate_up_body(case: _Case, dtype: Any) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    consumers, columns = case.config.consumers, case.columns
    column_layout = plgpu.Layout.WGMMA.reduce(0)

    def experts_gate_up(used, up_to, x, weights, gate_up, out, *, weights_s, tokens_s, out_s, full, free):
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        num_own = pl.cdiv(
            jnp.maximum(up_to[case.num_experts - 1] * case.output_tiles - cta, 0), case.num_ctas
        )

        def item(i):
            """The CTA's i-th item: place among the experts in use, and tile."""
            index = cta + i * case.num_ctas
            return lax.div(index, case.output_tiles), lax.rem(index, case.output_tiles)

        @pl.when(warpgroup == consumers)
        def _producer():
            slot_of = _ring(case, free)

            def one_item(i, _):
                place, tile = item(i)
                expert = used[place]

                def one_step(step, _):
                    slot = slot_of(i * case.num_steps + step)
                    inner = pl.ds(pl.multiple_of(step * case.step, case.step), case.step)
                    plgpu.copy_gmem_to_smem(x.at[:, inner], tokens_s.at[slot], full.at[slot])
                    _load_weights(
                        case,
                        lambda output, half: gate_up.at[expert, half, pl.ds(output, ROWS), inner],
                        tile,
                        weights_s.at[slot],
                        full.at[slot],
                    )

                lax.fori_loop(0, case.num_steps, one_step, None)

            lax.fori_loop(0, num_own, one_item, None)
            _drain(case, free, num_own * case.num_steps)

        @pl.when(warpgroup < consumers)
        def _consumer():
            def one_item(i, _):
                place, tile = item(i)
                scale = plgpu.load(
                    weights.at[used[place], pl.ds(0, columns)], layout=column_layout, optimized=False
                )
                refs = weights_s, tokens_s, full, free
                sums = _multiply(case, refs, i * case.num_steps, case.num_steps, warpgroup)
                for block in range(case.config.blocks):
                    output, exists = _output_of(case, tile, warpgroup, block)
                    gate, up = sums[2 * block], sums[2 * block + 1]
                    value = gate / (1.0 + jnp.exp(-gate)) * up * lax.broadcast_in_dim(scale, gate.shape, [1])

                    @pl.when(exists)
                    def _store(value=value, output=output):
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the one before has left
                        out_s.at[warpgroup].T[...] = value.astype(dtype)
                        plgpu.commit_smem()
                        rows = pl.ds(pl.multiple_of(place * columns, ALIGNED), columns)
                        plgpu.copy_smem_to_gmem(out_s.at[warpgroup], out.at[rows, pl.ds(output, ROWS)])

            lax.fori_loop(0, num_own, one_item, None)
            plgpu.wait_smem_to_gmem(0)

    return experts_gate_up


def _down_body(case: _Case, dtype: Any) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    consumers, columns, splits = case.config.consumers, case.columns, case.splits

    def experts_down(used, up_to, hidden, down, out, *, weights_s, tokens_s, full, free):
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        tile, part = lax.rem(cta, case.output_tiles), lax.div(cta, case.output_tiles)
        total = up_to[case.num_experts - 1] * case.num_steps
        first, last = lax.div(total * part, splits), lax.div(total * (part + 1), splits)
        steps = last - first

        @pl.when(warpgroup == consumers)
        def _producer():
            slot_of = _ring(case, free)

            def one_step(at, _):
                place, step = lax.div(first + at, case.num_steps), lax.rem(first + at, case.num_steps)
                expert = used[place]
                inner = pl.ds(pl.multiple_of(step * case.step, case.step), case.step)
                rows = pl.ds(pl.multiple_of(place * columns, ALIGNED), columns)
                slot = slot_of(at)
                _load_weights(
                    case,
                    lambda output, half: down.at[expert, pl.ds(output, ROWS), inner],
                    tile,
                    weights_s.at[slot],
                    full.at[slot],
                )
                plgpu.copy_gmem_to_smem(hidden.at[rows, inner], tokens_s.at[slot], full.at[slot])

            lax.fori_loop(0, steps, one_step, None)
            _drain(case, free, steps)

        @pl.when(warpgroup < consumers)
        def _consumer():
            sums = _multiply(case, (weights_s, tokens_s, full, free), 0, steps, warpgroup)
            for block, value in enumerate(sums):
                output, exists = _output_of(case, tile, warpgroup, block)

                @pl.when(exists)
                def _store(value=value, output=output):
                    store(out.at[part, pl.ds(output, ROWS)], value)

    del dtype
    return experts_down


@functools.cache
def _table() -> tuple[tuple[int, tuple[FewConfig, FewConfig]], ...]:
    """The tuning table's entries: most tokens, and configurations."""
    file = resources.files("pallas_kernels.grouped_matmul") / "gpu_tuning.json"
    entries = json.loads(file.read_text())["few"]
    return tuple((e["tokens"], (FewConfig(**e["gate_up"]), FewConfig(**e["down"]))) for e in entries)


@dataclass(frozen=True)
class GpuFewTokens:
    """Both kernels; see ``dispatch.FewTokens``. Static in the compiled step.

    Args:
        num_sms: multiprocessors to fill; None asks the first device.
        configs: of the two kernels, instead of the tuning table's; then any number of tokens that fits is taken.
        interpret: ``plgpu.InterpretGPUParams`` runs them on a CPU.
    """

    num_sms: int | None = None
    configs: tuple[FewConfig, FewConfig] | None = None
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
        num_sms = self.num_sms if self.num_sms is not None else jax.local_devices()[0].core_count
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
