"""Dense products for Hopper (Mosaic GPU): bfloat16 or float16 rows and weights, sums in float32.

Central ideas:

* Products are computed transposed: a weight's outputs are the 64-row side of the tensor core's instruction, tokens are
  its columns, of which there may be as few as 8. A tile is 64 outputs, or 128 (two multiplying warpgroups), and all
  tokens, or 256 of many: each weight is read once. One warpgroup loads, running ahead over the ends of items.
* Every multiprocessor gets the same number of steps, whatever divides what (``gpu_work``). Where there are too few
  outputs for that, the contracted dimension is cut into chunks, whose sums the last one to finish adds up in order.
* A row's bits depend on the weight's shape alone: the order of sums is fixed by the chunks, and these by the shape.
  Neither the number of rows nor the configuration or the number of multiprocessors has a part in it. ``for_all_rows``
  has one chunk whatever the shape.
* What follows a product in a layer happens where its sums are: adding the residual, silu(gate) * up.
* CTAs of a cluster may share the rows that they all need: each loads a part and sends it to all.
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

from pallas_kernels.dense_matmul.dispatch import Ahead
from pallas_kernels.dense_matmul.gpu_flags import signal, store_transposed, wait_for
from pallas_kernels.dense_matmul.gpu_work import Line, chunk_borders
from pallas_kernels.hopper import multiprocessors
from pallas_kernels.ragged_paged_attention.gpu_launch import launch
from pallas_kernels.ragged_paged_attention.gpu_primitives import add_and_fetch, store

ROWS = 64
"""Outputs of one instruction, and the elements of a swizzled line."""
COLUMNS = 64
"""Tokens stored at a time."""
ALIGNED = 8
WIDEST = 256
MOST_FOLDED = 128
"""Tokens of a tile whose sums a warpgroup can hold twice."""
SHARED_MEMORY = 232_448
"""Bytes of one CTA."""
DTYPES = ("bfloat16", "float16")
MANY = 4096
"""Counters come in so many, which will do for all kernels with few tokens."""
FILLED, MOST_CHUNKS, SHORTEST_CHUNK = 48, 4, 256
"""Chunks are made until there are so many of 64 outputs, up to so many and no shorter than that.

64 multiprocessors load 3.9 TB/s, and handing sums over costs 2 us."""


@dataclass(frozen=True)
class Config:
    """What is tuned. None of it changes a bit of the result.

    Args:
        width: tokens of a tile, a multiple of 8 up to 256.
        step: contracted elements loaded at a time, 64 or 128; 64 where 128 does not divide them.
        stages: steps in flight, 2 or more.
        cluster: CTAs that share the rows they load, 1, 2 or 4.
        consumers: multiplying warpgroups of a CTA, with 64 outputs each, 1 or 2.
        hand_over: sums go from one worker to another, so that all have as much to do.
        ahead: steps of 128 contracted elements of the weight that comes next, which each worker brings into the L2
            when its own loads are under way: those that the next kernel's workers load first.
        consumer_registers, producer_registers: registers a thread of a multiplying and of the loading warpgroup gets.
    """

    width: int
    step: int = 64
    stages: int = 4
    cluster: int = 1
    consumers: int = 2
    hand_over: bool = True
    ahead: int = 0
    consumer_registers: int = 216
    producer_registers: int = 72

    def __post_init__(self) -> None:
        if self.consumers not in (1, 2):
            raise ValueError(f"consumers are 1 or 2, not {self.consumers}")
        if self.cluster not in (1, 2, 4):
            raise ValueError(f"cluster is 1, 2 or 4, not {self.cluster}")
        if self.width % (ALIGNED * self.cluster) or not 0 < self.width <= WIDEST:
            raise ValueError(
                f"width is a multiple of {ALIGNED} x cluster ({self.cluster}) up to {WIDEST}, not {self.width}"
            )
        if self.width > COLUMNS and self.width % COLUMNS:
            raise ValueError(f"a width above {COLUMNS} is a multiple of it, unlike {self.width}")
        if self.step not in (64, 128):
            raise ValueError(f"step is 64 or 128, not {self.step}")
        if self.stages < 2:
            raise ValueError(
                "stages are 2 or more: a step's memory is free once the next one's product has begun"
            )
        # A CTA starts with 168 registers a thread, and a warpgroup that asks for more than are free waits for ever.
        if 2 * self.consumer_registers + self.producer_registers > 168 * 3:
            raise ValueError(f"{self} gives out more registers than a CTA has")
        if self.shared_memory > SHARED_MEMORY:
            raise ValueError(f"{self} needs {self.shared_memory} bytes of shared memory, of {SHARED_MEMORY}")

    @property
    def columns(self) -> int:
        """Tokens that leave at a time."""
        return min(self.width, COLUMNS)

    @property
    def shared_memory(self) -> int:
        """Bytes, about 1 KiB of barriers and alignment included, for results of 16 bits."""
        loads = self.stages * (self.consumers * ROWS + self.width) * self.step * 2
        return loads + self.consumers * self.columns * ROWS * 2 + 1024


@functools.cache
def _tuning() -> dict[str, Any]:
    file = resources.files("pallas_kernels.dense_matmul") / "gpu_tuning.json"
    return json.loads(file.read_text())


def tuned(num_rows: int, outputs: int, inner: int, *, chunked: bool = False, gated: bool = False) -> Config:
    """The table's configuration for so many rows.

    Args:
        outputs, inner: sizes of the weight.
        chunked: its contracted dimension is in chunks.
        gated: it is a gate's and as many others.
    """
    case = dict(outputs=outputs, inner=inner, chunked=chunked, gated=gated)
    for entry in _tuning()["tables"]:
        enough = entry["rows"] is None or num_rows <= entry["rows"]
        if enough and all(entry.get(key, value) == value for key, value in case.items()):
            rest = ("rows", "source", *case)
            return Config(**{key: value for key, value in entry.items() if key not in rest})
    raise ValueError("gpu_tuning.json has no entry for any number of rows: its last one's rows is null")


def chunks_of(outputs: int, inner: int) -> int:
    """Chunks of the contracted dimension. They decide a result's bits, so nothing but the shape decides them."""
    for entry in _tuning()["chunks"]:
        if (entry["outputs"], entry["inner"]) == (outputs, inner):
            return entry["chunks"]
    most = max(min(MOST_CHUNKS, inner // SHORTEST_CHUNK), 1)
    return min(pl.cdiv(FILLED, pl.cdiv(outputs, ROWS)), most)


def rows_from_table(outputs: int, inner: int, item_size: int, *, gated: bool = False) -> tuple[int, int]:
    """From how many to how many rows the table has this kernel multiply by an [outputs, inner] weight."""
    case = dict(outputs=outputs, inner=inner, gated=gated)
    mib = outputs * inner * item_size / 2**20
    for entry in _tuning()["used"]:
        large = mib >= entry.get("mib_from", 0) and outputs >= entry.get("outputs_from", 0)
        if large and all(entry.get(key, value) == value for key, value in case.items()):
            first, last = entry["rows"]
            return first, last
    return 1, 0


def supported(outputs: int, inner: int, dtype: Any, *, gated: bool = False) -> str | None:
    """Why the kernel cannot multiply by an [outputs, inner] weight, None when it can."""
    name = jnp.dtype(dtype).name
    if name not in DTYPES:
        return f"the Hopper dense product takes {' or '.join(DTYPES)}, not {name}"
    multiple = 2 * ROWS if gated else ROWS
    if outputs % multiple or inner % ROWS:
        return (
            f"the Hopper dense product takes weights whose sizes are multiples of {multiple} and {ROWS}, not "
            f"{outputs} x {inner}"
        )
    return None


def dense_matmul(
    x: jax.Array, weight: jax.Array, *, config: Config, num_sms: int, residual: jax.Array | None = None,
    gated: bool = False, out_dtype: Any = None, ahead: Ahead | None = None, chunks: int | None = None,
    interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """[T, N], or [T, N / 2] with ``gated``; see ``reference``. Sums in float32, rounded to ``out_dtype`` (x's).

    Args:
        x: [T, K].
        weight: [N, K] of the same type; N and K multiples of 64.
        num_sms: multiprocessors to fill.
        residual: [T, N] of x's type.
        ahead: what comes next, of which ``config.ahead`` steps are brought into the L2.
        chunks: instead of the shape's own; then the bits are others.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_rows, (outputs, inner) = x.shape[0], weight.shape
    token_tiles = pl.cdiv(num_rows, config.width)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if out_dtype != x.dtype and (out_dtype != jnp.float32 or gated or residual is not None):
        raise ValueError(
            f"a product of {x.dtype} is rounded to that, or to float32 without gate and residual, not {out_dtype}"
        )
    # The copy engine leaves out rows that are not there, where there is one tile of them.
    cut = token_tiles == 1 and (num_rows <= ALIGNED or num_rows % ALIGNED == 0)
    cut = cut and interpret is None and out_dtype == x.dtype
    rows = num_rows if cut else token_tiles * config.width
    if rows != num_rows:
        pad = ((0, rows - num_rows), (0, 0))
        x, residual = jnp.pad(x, pad), None if residual is None else jnp.pad(residual, pad)
    chunks = chunks_of(outputs, inner) if chunks is None else chunks
    if gated and config.consumers != 2:
        config = replace(config, consumers=2)
    case = _Case(
        config, outputs, inner, 1 if gated else chunks, token_tiles > 1, num_sms // config.cluster, gated,
        residual is not None, out_dtype.name, atomic=interpret is None,
    )  # fmt: skip
    if ahead is not None and config.ahead and not case.many_tokens:
        next_outputs, next_inner = ahead.weight.shape
        next_chunks = 1 if ahead.gated else chunks_of(next_outputs, next_inner)
        of_next = tuned(num_rows, next_outputs, next_inner, chunked=next_chunks > 1, gated=ahead.gated)
        if of_next.cluster == config.cluster:
            following = replace(
                case, config=of_next, outputs=next_outputs, inner=next_inner, chunks=next_chunks, gated=ahead.gated,
                has_residual=False, out_dtype=x.dtype.name,
            )  # fmt: skip
            case = replace(case, next=following)
    # Zero before and after every call. They are changed behind XLA's back, which would copy them for each call if it
    # knew: kernels of a program follow one another, so that all of them may use the same.
    # They have one size, so that all of a program's are one array.
    num_counters = case.num_handed + case.num_sums(token_tiles)
    counters = jnp.zeros(pl.cdiv(num_counters, MANY) * MANY, jnp.int32)
    operands, refs = [x, weight] + ([residual] if residual is not None else []), []
    batched = [0] + ([2] if residual is not None else [])
    if case.many_tokens:
        operands.append(jnp.full(4, token_tiles, jnp.int32))
    if ahead is not None and case.next is not None:
        operands.append(ahead.weight)
    if interpret is None:
        operands.append(counters)
    else:
        refs.append(jax.new_ref(counters))
    batched += [len(operands) + len(refs) - 1, len(operands) + len(refs)]
    out_type = (jax.ShapeDtypeStruct((rows, outputs // 2 if gated else outputs), out_dtype),)
    if case.shares_chunks:
        out_type += (jax.ShapeDtypeStruct((case.num_handed, ROWS, config.width), jnp.float32),)
    if case.chunks > 1 and not case.folds:
        batched.append(len(operands) + len(refs) + len(out_type))
        num_partials = case.num_sums(token_tiles) * chunks
        out_type += (jax.ShapeDtypeStruct((num_partials, ROWS, config.width), jnp.float32),)
    clusters: dict[str, Any] = {}
    if config.cluster > 1:
        clusters = dict(cluster=(config.cluster,), cluster_names=("cluster",))
    build = functools.partial(
        plgpu.kernel,
        _kernel_body(case, x.dtype),
        grid=(case.num_workers,),
        grid_names=("worker",),
        num_threads=config.consumers + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(case, x.dtype),
        kernel_name="dense_matmul",
        interpret=interpret,
        **clusters,
    )
    out = launch(
        lambda out_type: build(out_type=out_type), ("dense_matmul", case, x.dtype.name),
        operands, refs, out_type, batched=batched if case.many_tokens else [], interpret=interpret,
    )[0]  # fmt: skip
    return out[:num_rows]


@dataclass(frozen=True)
class _Case:
    """What one compiled kernel is made for."""

    config: Config
    outputs: int
    inner: int
    chunks: int
    many_tokens: bool
    """There are several tiles of tokens: how many, the kernel is told. One serves any number."""
    most_workers: int
    gated: bool
    has_residual: bool
    out_dtype: str
    atomic: bool
    next: _Case | None = None
    """The product whose weight is brought into the L2."""

    @property
    def step(self) -> int:
        return self.config.step if self.inner % self.config.step == 0 else ROWS

    @property
    def stages(self) -> int:
        return self.config.stages * self.config.step // self.step

    @property
    def output_tiles(self) -> int:
        """Of one cluster's CTAs, which walk a line together, each with outputs of its own."""
        return pl.cdiv(self.outputs, self.config.consumers * ROWS * self.config.cluster)

    def line(self, token_tiles: Any) -> Line:
        """The work, of so many tiles of tokens."""
        borders = tuple(each // self.step for each in chunk_borders(self.inner, self.chunks))
        tiles = self.output_tiles * token_tiles
        hand_over = self.config.hand_over and not self.folds
        return Line.shared_by(self.most_workers, tiles, borders, hand_over=hand_over, folds=self.folds)

    @property
    def folds(self) -> bool:
        """A tile's chunks are added up by the workers one after another: with many tiles nobody waits for that."""
        return self.many_tokens and self.chunks > 1 and self.config.width <= MOST_FOLDED

    @property
    def num_workers(self) -> int:
        return self.most_workers if self.many_tokens else self.line(1).workers

    @functools.cached_property
    def shares_chunks(self) -> bool:
        return self.config.hand_over or self.folds if self.many_tokens else self.line(1).shares_chunks

    @property
    def num_handed(self) -> int:
        """Sums that a worker may leave to the next one, each with a flag."""
        return self.num_workers * self.config.cluster * self.config.consumers

    def num_sums(self, token_tiles: int) -> int:
        """64 outputs of a tile, each with a count of chunks."""
        return self.output_tiles * token_tiles * self.config.cluster * self.config.consumers


def _scratch(case: _Case, dtype: Any) -> dict[str, Any]:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    config, step, stages = case.config, case.step, case.stages

    def tiled(kind: Any) -> Any:
        return plgpu.TilingTransform((8, 128 // jnp.dtype(kind).itemsize)), plgpu.SwizzleTransform(128)

    scratch: dict[str, Any] = dict(
        weights_s=plgpu.SMEM((stages, config.consumers, ROWS, step), dtype, transforms=tiled(dtype)),
        tokens_s=plgpu.SMEM((stages, config.width, step), dtype, transforms=tiled(dtype)),
        out_s=plgpu.SMEM((config.consumers, config.columns, ROWS), dtype, transforms=tiled(dtype)),
        full=plgpu.Barrier(num_arrivals=config.consumers + 1, num_barriers=stages),
        count_s=plgpu.SMEM((config.consumers, 1), jnp.int32),
    )
    if config.cluster > 1:
        scratch["free"] = plgpu.ClusterBarrier(
            collective_axes=("cluster",), num_arrivals=config.consumers, num_barriers=stages
        )
    else:
        scratch["free"] = plgpu.Barrier(num_arrivals=config.consumers, num_barriers=stages)
    if case.gated:
        # The second multiplying warpgroup hands its sums to the first, which alone stores.
        scratch["out_s"] = plgpu.SMEM((1, config.columns, ROWS), dtype, transforms=tiled(dtype))
        line, swizzled = config.columns * 2, ()
        if line in (32, 64, 128):
            swizzled = plgpu.TilingTransform((8, config.columns)), plgpu.SwizzleTransform(line)
        scratch["up_s"] = plgpu.SMEM((ROWS, config.columns), dtype, transforms=swizzled)
        scratch["up_full"] = plgpu.Barrier()
        scratch["up_free"] = plgpu.Barrier()
    if case.has_residual:
        scratch["residual_full"] = plgpu.Barrier(num_barriers=config.consumers)
    return scratch


def _kernel_body(case: _Case, dtype: Any) -> Any:
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
                    value = before.astype(jnp.float32) + value.astype(dtype).astype(jnp.float32)
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


@dataclass(frozen=True)
class GpuDenseMatmul:
    """The kernel on Hopper; see ``dispatch.DenseMatmul``. Static in the compiled step.

    Args:
        num_sms: multiprocessors to fill; None asks the first device.
        config: instead of the tuning table's.
        always: used for any number of rows, not only where the table says so.
        invariant: one chunk for all shapes, used for all numbers of rows; from those on for which the table leaves
            them to XLA, that adds up in the same order.
        chunks: instead of the shape's own, for measurements.
        interpret: ``plgpu.InterpretGPUParams`` runs it on a CPU.
    """

    num_sms: int | None = None
    config: Config | None = None
    always: bool = False
    invariant: bool = False
    chunks: int | None = None
    interpret: Any = None
    name = "mosaic_gpu"

    def why_not(
        self,
        num_rows: int,
        outputs: int,
        inner: int,
        dtype: Any,
        *,
        gated: bool = False,
        residual: bool = False,
    ) -> str | None:
        """Why it does not multiply so many rows by an [outputs, inner] weight, None when it does."""
        if (reason := supported(outputs, inner, dtype, gated=gated)) is not None or self.always:
            return reason
        if self.invariant:
            policy = _tuning()["invariant"]
            if gated and not policy["gated"]:
                return "gpu_tuning.json leaves silu(gate) * up to XLA, which rounds it otherwise"
            first, last = 1, policy["residual" if residual else "to"]
        else:
            first, last = rows_from_table(outputs, inner, jnp.dtype(dtype).itemsize, gated=gated)
        if num_rows < first or (last is not None and num_rows > last):
            return f"gpu_tuning.json leaves {num_rows} rows by {outputs} x {inner} to XLA"
        return None

    def for_all_rows(self) -> GpuDenseMatmul:
        """See ``DenseMatmul``."""
        return replace(self, invariant=True)

    def __call__(
        self, x: jax.Array, weight: jax.Array, *, residual: jax.Array | None = None, gated: bool = False,
        out_dtype: Any = None, ahead: Ahead | None = None,
    ) -> jax.Array:  # fmt: skip
        """[T, N], or [T, N / 2] with ``gated``.

        Raises:
            ValueError: what ``why_not`` says, or operands of two types.
        """
        if x.dtype != weight.dtype:
            raise ValueError(
                f"the Hopper dense product takes rows and weights of one type, not {x.dtype} and {weight.dtype}"
            )
        added = residual is not None
        reason = self.why_not(x.shape[0], *weight.shape, x.dtype, gated=gated, residual=added)
        if reason is not None:
            raise ValueError(reason)
        num_sms = multiprocessors(self.num_sms)
        num_rows, following = x.shape[0], None if ahead is None else ahead.weight
        chunks = self.chunks or (1 if self.invariant else chunks_of(*weight.shape))
        config = self.config or tuned(num_rows, *weight.shape, chunked=chunks > 1 and not gated, gated=gated)
        if following is None or self.why_not(num_rows, *following.shape, following.dtype, gated=ahead.gated):
            ahead = None
        return _jitted(
            x, weight, residual, ahead if config.ahead else None, config, num_sms, gated, out_dtype, chunks,
            self.interpret,
        )  # fmt: skip


@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7, 8, 9))
def _jitted(
    x: jax.Array, weight: jax.Array, residual: jax.Array | None, ahead: Ahead | None, config: Config,
    num_sms: int, gated: bool, out_dtype: Any, chunks: int | None, interpret: Any,
) -> jax.Array:  # fmt: skip
    """Traced once for all layers of a step."""
    return dense_matmul(
        x, weight, config=config, num_sms=num_sms, residual=residual, gated=gated, out_dtype=out_dtype,
        ahead=ahead, chunks=chunks, interpret=interpret,
    )  # fmt: skip


__all__ = ["Config", "GpuDenseMatmul", "chunks_of", "dense_matmul", "supported", "tuned"]
