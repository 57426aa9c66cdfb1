"""Grouped matmul for Hopper (Mosaic GPU): bfloat16 or float16 rows and matrices, sums in float32.

Central ideas:

* Products are computed transposed: a matrix' outputs are the 64-row side of the tensor core's instruction, tokens are
  its columns, of which there may be as few as 8. So the few rows an expert gets in decoding waste little, and each
  weight is read once for a tile of tokens; with many rows the same code has wider tiles.
* One persistent grid over a list of tiles (``gpu_work``) by blocks of outputs, a block of all tiles' next to another:
  CTAs that run at the same time share rows and matrices in the L2. One warpgroup loads, running ahead over the ends
  of items; two multiply.
* Tiles may begin and end with rows of other groups, which are computed and not stored: rows leave shared memory by
  eights where all of them are the group's, one at a time where not.
* Between one item's products and the next's nothing is computed, so nothing is waited for there that could have been
  known before: an item's fields are read an item early, and rows that leave singly have memory of their own.
* A step's loads take longer than its product, most of all the matrices', which come from the device's memory while
  others of the group's tiles load the same: so there may be one step more of them in flight than of the tokens
  (``Config.extra``), or they are brought into the L2 before (``Config.ahead``).
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from dataclasses import dataclass
from importlib import resources
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu  # stored programs need its runtime, and tracing nothing imports nothing
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul.gpu_few import GpuFewTokens
from pallas_kernels.grouped_matmul.gpu_few_tuning import FewConfig
from pallas_kernels.grouped_matmul.gpu_route import GpuRoute
from pallas_kernels.grouped_matmul.gpu_work import ALIGNED, Item, list_tiles, padded_rows
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.mosaic_gpu.launch import launch
from pallas_kernels.mosaic_gpu.primitives import copy_layout, store

ROWS = 64
"""Outputs of one instruction, and the elements of a swizzled line."""
CONSUMERS = 2
ENDS = 2
"""Of a tile, whose rows may leave one by one."""
SHARED_MEMORY = 232_448
"""Bytes of one CTA."""
DTYPES = ("bfloat16", "float16")
FIELDS = (Item.GROUP, Item.FIRST, Item.BEGIN, Item.END, Item.WIDTH)


@dataclass(frozen=True)
class Config:
    """What is tuned.

    Args:
        widths: tokens of a tile, ascending multiples of 8 up to 256: each has code of its own.
        blocks: blocks of 64 outputs that one multiplying warpgroup computes of a tile.
        step: contracted elements loaded at a time, 64 or a multiple; 64 where it does not divide them.
        stages: steps in flight, 2 or more.
        extra: steps of the matrices in flight beyond those, 0 or 1.
        ahead: steps after those just loaded whose matrices are brought into the L2, over the ends of items, each by
            one of two tiles that are next to another, and an item's tokens by the first of its tiles; 0 for none.
        consumer_registers, producer_registers: registers a thread of a multiplying and of the loading warpgroup gets.
    """

    widths: tuple[int, ...]
    blocks: int = 1
    step: int = 64
    stages: int = 4
    extra: int = 0
    ahead: int = 0
    consumer_registers: int = 216
    producer_registers: int = 72

    def __post_init__(self) -> None:
        if not self.widths or any(w % ALIGNED or not 0 < w <= 256 for w in self.widths):
            raise ValueError(f"widths are multiples of {ALIGNED} up to 256, not {self.widths}")
        if list(self.widths) != sorted(set(self.widths)):
            raise ValueError(f"widths ascend, unlike {self.widths}")
        if self.step % ROWS or self.step > 256:
            raise ValueError(f"step is a multiple of {ROWS} up to 256, not {self.step}")
        if self.stages < 2:
            raise ValueError(
                "stages are 2 or more: a step's memory is free once the next one's product has begun"
            )
        if self.extra not in (0, 1):
            raise ValueError(f"extra stages are 0 or 1, not {self.extra}")
        if self.ahead < 0:
            raise ValueError(f"steps ahead of the stages are 0 or more, not {self.ahead}")
        # A CTA starts with 168 registers a thread, and a warpgroup that asks for more than are free waits for ever.
        if CONSUMERS * self.consumer_registers + self.producer_registers > 168 * (CONSUMERS + 1):
            raise ValueError(f"{self} gives out more registers than a CTA has")
        if self.blocks * self.widths[-1] // 2 > self.consumer_registers - 40:
            raise ValueError(f"{self}: the sums leave a thread too few registers")
        if self.shared_memory > SHARED_MEMORY:
            raise ValueError(f"{self} needs {self.shared_memory} bytes of shared memory, of {SHARED_MEMORY}")

    @property
    def outputs(self) -> int:
        """Of a tile."""
        return CONSUMERS * self.blocks * ROWS

    @property
    def shared_memory(self) -> int:
        """Bytes, about 1 KiB of barriers and alignment included."""
        weights = (self.stages + self.extra) * self.outputs * self.step * 2
        tokens = self.stages * self.widths[-1] * self.step * 2
        return weights + tokens + CONSUMERS * (self.widths[-1] + ENDS * ALIGNED) * ROWS * 2 + 1024


@functools.cache
def _tuning() -> dict[str, Any]:
    file = resources.files("pallas_kernels.grouped_matmul") / "gpu_tuning.json"
    return json.loads(file.read_text())


def tuned(num_rows: int, num_groups: int, *, gated: bool = False) -> Config:
    """The table's configuration for so many rows of so many groups, ``gated`` that of a gate's and as many others."""
    for entry in _tuning()["tables"]:
        most = entry["rows_per_group"]
        if entry.get("gated", gated) == gated and (most is None or num_rows <= most * num_groups):
            rest = ("rows_per_group", "gated", "source")
            fields = {key: value for key, value in entry.items() if key not in rest}
            return Config(**{**fields, "widths": tuple(fields["widths"])})
    raise ValueError(
        "gpu_tuning.json has no entry for any number of rows: its last one's rows_per_group is null"
    )


def supported(outputs: int, inner: int, dtype: Any) -> str | None:
    """Why the kernel cannot multiply by [outputs, inner] matrices, None when it can."""
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        return f"the Hopper grouped matmul takes {' or '.join(DTYPES)}, not {name}"
    if outputs % ROWS or inner % ROWS:
        return f"the Hopper grouped matmul takes matrices whose sizes are multiples of {ROWS}, not {outputs} x {inner}"
    return None


def grouped_matmul(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, *, config: Config, num_sms: int, interpret: Any = None
) -> jax.Array:  # fmt: skip
    """[N, M] in lhs's type, accumulated in float32; padding rows are zero.

    Args:
        lhs: [N, K], sorted by group, padding last.
        rhs: [E, M, K] of the same type; M and K multiples of 64. Or [E, 2, M, K], gate and up: then the result is
            silu(gate) * up.
        group_sizes: int32 [E].
        num_sms: multiprocessors to fill.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_rows, (num_groups, *halves, outputs, inner) = lhs.shape[0], rhs.shape
    rows = padded_rows(num_rows, config.widths)
    work = list_tiles(group_sizes, rows, config.widths)
    if rows != num_rows:
        lhs = jnp.pad(lhs, ((0, rows - num_rows), (0, 0)))
    case = _Case(config, num_groups, math.prod(halves), outputs, inner, num_sms)
    build = functools.partial(
        plgpu.kernel,
        _kernel_body(case, lhs.dtype),
        grid=(num_sms,),
        grid_names=("cta",),
        num_threads=case.consumers + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(case, lhs.dtype),
        kernel_name="grouped_matmul",
        interpret=interpret,
    )
    [out] = launch(
        lambda out_type: build(out_type=out_type), ("grouped_matmul", case, lhs.dtype.name),
        [work.items, work.up_to, lhs, rhs], [], (jax.ShapeDtypeStruct((rows, outputs), lhs.dtype),),
        batched=[0, 2, 4], interpret=interpret,
    )  # fmt: skip
    return out[:num_rows]


@dataclass(frozen=True)
class _Case:
    """What one compiled kernel is made for: matrices of [outputs, inner], one of a group or two (gate and up)."""

    config: Config
    num_groups: int
    halves: int
    outputs: int
    inner: int
    num_ctas: int

    @property
    def step(self) -> int:
        return self.config.step if self.inner % self.config.step == 0 else ROWS

    @property
    def stages(self) -> int:
        return self.config.stages * self.config.step // self.step

    @property
    def ring(self) -> int:
        """Steps of the matrices in flight, and barriers."""
        return self.stages + self.config.extra

    @property
    def consumers(self) -> int:
        """Multiplying warpgroups: a single one where gate and up of 64 outputs are all of a tile."""
        return min(CONSUMERS, CONSUMERS * self.config.blocks // self.halves)

    @property
    def blocks(self) -> int:
        """Of 64 outputs that one of them computes of each half of a tile."""
        return self.config.blocks * CONSUMERS // (self.halves * self.consumers)

    @property
    def tile_outputs(self) -> int:
        return self.consumers * self.blocks * ROWS

    @property
    def output_tiles(self) -> int:
        return pl.cdiv(self.outputs, self.tile_outputs)


def _scratch(case: _Case, dtype: Any) -> dict[str, Any]:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    step, stages, ring = case.step, case.stages, case.ring
    widest, consumers = case.config.widths[-1], case.consumers
    products = case.blocks * case.halves
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return dict(
        weights_s=plgpu.SMEM((ring, consumers, products, ROWS, step), dtype, transforms=tiled),
        tokens_s=plgpu.SMEM((stages, widest, step), dtype, transforms=tiled),
        out_s=plgpu.SMEM((consumers, widest, ROWS), dtype, transforms=tiled),
        row_s=plgpu.SMEM((consumers, ENDS, ALIGNED, ROWS), dtype),
        full=plgpu.Barrier(num_arrivals=consumers * products + 1, num_barriers=ring),
        free=plgpu.Barrier(num_arrivals=consumers, num_barriers=ring),
    )


def silu(x: jax.Array) -> jax.Array:
    """Of float32."""
    return x / (1.0 + jnp.exp(-x))


def _kernel_body(case: _Case, dtype: Any) -> Any:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    config, step_size, consumers = case.config, case.step, case.consumers
    stages, ring, extra, ahead = case.stages, case.ring, case.config.extra, case.config.ahead
    products = case.blocks * case.halves
    num_steps = case.inner // step_size
    pieces_at_once = min(4, config.widths[-1] // ALIGNED)

    def grouped_matmul(items, up_to, lhs, rhs, out, *, weights_s, tokens_s, out_s, row_s, full, free):
        cta, warpgroup = lax.axis_index("cta"), lax.axis_index("warpgroup")
        work = up_to[case.num_groups] * case.output_tiles
        num_own = pl.cdiv(jnp.maximum(work - cta, 0), case.num_ctas)

        def read(i):
            """The fields of the CTA's i-th item, of some item where there is no such one."""
            index = jnp.minimum(cta + i * case.num_ctas, jnp.maximum(work - 1, 0))
            return tuple(items[lax.div(index, case.output_tiles), field] for field in FIELDS)

        def item(i, fields):
            """The i-th item: its fields, the first output of its tile, its steps."""
            group, first, begin, end, width = fields
            tile = lax.rem(cta + i * case.num_ctas, case.output_tiles) * case.tile_outputs
            steps = jnp.where(group < case.num_groups, num_steps, 0)
            return group, pl.multiple_of(first, ALIGNED), begin, end, width, tile, steps

        def over_items(action):
            """``action(i, item, next item, steps before)`` for each of the CTA's; returns all of its steps."""

            def one_item(i, carry):
                done, fields = carry
                following = read(i + 1)  # now, so that they are there when it is their turn
                now = item(i, fields)
                action(i, now, item(i + 1, following), done)
                return done + now[-1], following

            return lax.fori_loop(0, num_own, one_item, (jnp.int32(0), read(0)))[0]

        def output_blocks(tile, consumer):
            """For each block of 64 outputs: its number in the tile, its first output, whether there is such a one."""
            for block in range(case.blocks):
                first = tile + (consumer * case.blocks + block) * ROWS
                yield block, pl.multiple_of(first, ROWS), first < case.outputs

        def for_width(which, action):
            """Run ``action(width)`` for the width in question."""
            for index, width in enumerate(config.widths):
                pl.when(which == index)(functools.partial(action, width))

        @pl.when(warpgroup == consumers)
        def _producer():
            if consumers == CONSUMERS:
                plgpu.set_max_registers(config.producer_registers, action="decrease")

            def blocks_of(group, tile, step, consumers):
                """Of those consumers: each one's blocks by their numbers, where they are, whether they exist."""
                inner = inner_of(step)
                for consumer, half in itertools.product(consumers, range(case.halves)):
                    matrix = rhs.at[group] if case.halves == 1 else rhs.at[group, half]
                    for block, output, exists in output_blocks(tile, consumer):
                        source = matrix.at[pl.ds(output, ROWS), inner]
                        yield consumer, block * case.halves + half, source, exists

            def inner_of(step):
                first = step * step_size
                return pl.ds(first if isinstance(step, int) else pl.multiple_of(first, step_size), step_size)

            def load_weights(group, tile, step, at):
                slot = lax.rem(at, ring)
                for consumer, number, source, exists in blocks_of(group, tile, step, range(consumers)):
                    target = weights_s.at[slot, consumer, number]

                    @pl.when(exists)
                    def _load(source=source, target=target):
                        plgpu.copy_gmem_to_smem(source, target, full.at[slot])

                    # The arrival that the copy would make.
                    pl.when(jnp.logical_not(exists))(lambda: plgpu.barrier_arrive(full.at[slot]))

            def prefetch(i, now, following, step):
                """Into the L2 what is loaded ``ahead`` steps later: half of it, a neighbour with the same group has
                the other half."""
                (group, *_, tile, steps), (next_group, *_, next_tile, next_steps) = now, following
                here = step < steps
                group, tile = jnp.where(here, group, next_group), jnp.where(here, tile, next_tile)
                step = jnp.where(here, step, step - steps)
                is_one = here | ((i + 1 < num_own) & (step < next_steps))
                row = lax.div(cta + i * case.num_ctas, case.output_tiles)
                group = jnp.minimum(group, case.num_groups - 1)
                for _, _, source, exists in blocks_of(group, tile, step, [lax.rem(row, consumers)]):
                    plgpu.async_prefetch(source, predicate=is_one & exists)

            def load_item(i, now, following, done):
                group, first, _, _, which, tile, steps = now

                def load(width):
                    def one_step(step, _):
                        at = done + step
                        # Free of the step that had the tokens' place, and with it of the extra one's.
                        pl.when(at >= stages)(lambda: plgpu.barrier_wait(free.at[lax.rem(at - stages, ring)]))
                        plgpu.copy_gmem_to_smem(
                            lhs.at[pl.ds(first, width), inner_of(step)],
                            tokens_s.at[lax.rem(at, stages), pl.ds(0, width)],
                            full.at[lax.rem(at, ring)],
                        )
                        if extra:
                            pl.when(step + 1 < steps)(lambda: load_weights(group, tile, step + 1, at + 1))
                        else:
                            load_weights(group, tile, step, at)
                        if ahead:
                            coming = step + extra + ahead
                            tokens = lhs.at[pl.ds(first, width), inner_of(coming)]
                            plgpu.async_prefetch(tokens, predicate=(tile == 0) & (coming < steps))
                            prefetch(i, now, following, coming)

                    if extra:  # its place was free when the tokens before were loaded
                        pl.when(steps > 0)(lambda: load_weights(group, tile, 0, done))
                    lax.fori_loop(0, steps, one_step, None)

                for_width(which, load)

            done = over_items(load_item)
            for back in range(stages):
                last = lax.rem(done - 1 - back, ring)
                pl.when(done > back)(lambda last=last: plgpu.barrier_wait(free.at[last]))

        @pl.when(warpgroup < consumers)
        def _consumer():
            if consumers == CONSUMERS:
                plgpu.set_max_registers(config.consumer_registers, action="increase")

            def store_rows(which, piece, first, output, begin, end):
                """Write rows begin to end (clamped) of 8 at one of the ends, one by one."""
                rows = pl.ds(pl.multiple_of(piece * ALIGNED, ALIGNED), ALIGNED)
                value = plgpu.load(out_s.at[warpgroup, rows], layout=copy_layout(ALIGNED, ROWS))
                store(row_s.at[warpgroup, which], value)
                plgpu.commit_smem()

                def one_row(i, _):
                    target = out.at[pl.ds(first + i, 1), pl.ds(output, ROWS)]
                    plgpu.copy_smem_to_gmem(row_s.at[warpgroup, which, pl.ds(i, 1)], target)

                lax.fori_loop(jnp.maximum(begin, 0), jnp.minimum(end, ALIGNED), one_row, None)

            def store_tile(result, width, first, output, begin, end):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the one before has left, its ends too
                out_s.at[warpgroup, pl.ds(0, width)].T[...] = result.astype(dtype)
                plgpu.commit_smem()

                def copy_pieces(piece, pieces):
                    size = pieces * ALIGNED
                    rows = pl.ds(pl.multiple_of(piece * ALIGNED, ALIGNED), size)
                    target = pl.ds(pl.multiple_of(first + piece * ALIGNED, ALIGNED), size)
                    plgpu.copy_smem_to_gmem(out_s.at[warpgroup, rows], out.at[target, pl.ds(output, ROWS)])

                whole_from, whole_to = pl.cdiv(begin, ALIGNED), lax.div(end, ALIGNED)
                several = lax.div(jnp.maximum(whole_to - whole_from, 0), pieces_at_once)
                lax.fori_loop(
                    0,
                    several,
                    lambda i, _: copy_pieces(whole_from + i * pieces_at_once, pieces_at_once),
                    None,
                )
                lax.fori_loop(
                    whole_from + several * pieces_at_once,
                    whole_to,
                    lambda piece, _: copy_pieces(piece, 1),
                    None,
                )

                def one_end(i, _):
                    piece = lax.div(jnp.where(i == 0, begin, end), ALIGNED)
                    row = piece * ALIGNED
                    some = (begin > row) | (end < row + ALIGNED)
                    again = (i == 1) & (piece == lax.div(begin, ALIGNED))
                    pl.when(some & jnp.logical_not(again) & (end > row))(
                        lambda: store_rows(i, piece, first + row, output, begin - row, end - row)
                    )

                lax.fori_loop(0, ENDS, one_end, None)

            def multiply_item(_, now, __, done):
                _, first, begin, end, which, tile, steps = now

                def multiply(width):
                    def sums_of(*sums):
                        def one_step(step, _):
                            at = done + step
                            slot = lax.rem(at, ring)
                            plgpu.barrier_wait(full.at[slot])
                            tokens = tokens_s.at[lax.rem(at, stages), pl.ds(0, width)].T
                            for block, each in enumerate(sums):
                                plgpu.wgmma(each, weights_s.at[slot, warpgroup, block], tokens)
                            plgpu.wgmma_wait(products)  # the step before is done with its slot
                            before = lax.rem(at + ring - 1, ring)
                            pl.when(step > 0)(lambda: plgpu.barrier_arrive(free.at[before]))

                        lax.fori_loop(0, steps, one_step, None)
                        plgpu.wgmma_wait(0)
                        last = lax.rem(done + steps + ring - 1, ring)
                        pl.when(steps > 0)(lambda: plgpu.barrier_arrive(free.at[last]))
                        return tuple(each[...] for each in sums)

                    room = [plgpu.ACC((ROWS, width), jnp.float32)] * products
                    results = pl.run_scoped(sums_of, *room)
                    if case.halves == 2:
                        results = [
                            silu(gate) * up for gate, up in zip(results[::2], results[1::2], strict=True)
                        ]
                    for (_, output, exists), result in zip(
                        output_blocks(tile, warpgroup), results, strict=True
                    ):
                        pl.when(exists)(
                            functools.partial(store_tile, result, width, first, output, begin, end)
                        )

                for_width(which, multiply)

            over_items(multiply_item)
            plgpu.wait_smem_to_gmem(0)

    return grouped_matmul


@dataclass(frozen=True)
class GpuGroupedMatmul:
    """The kernel on Hopper; see ``dispatch.GroupedMatmul``. Static in the compiled step.

    Args:
        num_sms: multiprocessors to fill; None asks the first device.
        config: instead of the tuning table's.
        interpret: ``plgpu.InterpretGPUParams`` runs it on a CPU.
        few_configs: of the kernels for few tokens, instead of the tuning table's.
    """

    num_sms: int | None = None
    config: Config | None = None
    interpret: Any = None
    few_configs: tuple[FewConfig, FewConfig] | FewConfig | None = None
    name = "mosaic_gpu"

    @property
    def few(self) -> GpuFewTokens:
        """What takes few tokens' experts as a whole."""
        return GpuFewTokens(self.num_sms, self.few_configs, self.interpret)

    @property
    def route(self) -> GpuRoute:
        """What chooses many tokens' experts."""
        return GpuRoute(self.num_sms, self.interpret)

    def why_not(self, outputs: int, inner: int, dtype: Any) -> str | None:
        """Why it cannot multiply by [outputs, inner] matrices, None when it can."""
        return supported(outputs, inner, dtype)

    def __call__(self, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """[N, M].

        Raises:
            ValueError: what ``why_not`` says, or operands of two types.
        """
        return self._multiply(lhs, rhs, group_sizes)

    def gated(self, lhs: jax.Array, gate_up: jax.Array, group_sizes: jax.Array) -> jax.Array:
        """[N, F], silu(gate) * up of rows [N, M] and matrices [E, 2, F, M], in one kernel.

        Raises:
            ValueError: what ``why_not`` says, or operands of two types.
        """
        return self._multiply(lhs, gate_up, group_sizes)

    def _multiply(self, lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        num_rows, (num_groups, *_, outputs, inner) = lhs.shape[0], rhs.shape
        if lhs.dtype != rhs.dtype:
            raise ValueError(
                f"the Hopper grouped matmul takes rows and matrices of one type, not {lhs.dtype} and {rhs.dtype}"
            )
        if (reason := self.why_not(outputs, inner, lhs.dtype)) is not None:
            raise ValueError(reason)
        num_sms = multiprocessors(self.num_sms)
        config = self.config or tuned(num_rows, num_groups, gated=rhs.ndim == 4)
        return _jitted(lhs, rhs, group_sizes, config, num_sms, self.interpret)


@functools.partial(jax.jit, static_argnums=(3, 4, 5))
def _jitted(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, config: Config, num_sms: int, interpret: Any
) -> jax.Array:
    """Traced once for all layers of a step."""
    return grouped_matmul(lhs, rhs, group_sizes, config=config, num_sms=num_sms, interpret=interpret)


__all__ = ["Config", "GpuGroupedMatmul", "grouped_matmul", "supported", "tuned"]
