"""Ragged paged attention for TPU (Mosaic), one kernel for decoding and longer rows.

Central idea: the batch is a list of items (one query of a decoding row, or a tile of queries of another row), and an
item a walk over chunks of its visible keys. The walk over all items and chunks is one dynamic loop, in which the next
chunk, be it the next item's first, is copied from the paged cache while the current one is computed; padding costs
nothing, because no item stands for it. Softmax is online, in float32. Chunks lie at absolute positions, so that a
row's result does not depend on the other rows. All query heads of a KV head share the chunk.

Queries and results travel in float32 with the token as a major dimension: tokens then start anywhere, where packed
types would demand alignment. Keys and values lie in the cache as [num_blocks, P, K, block_size, L]: one copy brings a
block of all heads. P is 2 (keys, then values), or 1 for heads of up to 64, whose keys and values share the lanes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_cache_update.tpu import in_hbm
from pallas_kernels.ragged_paged_attention.options import AttentionOptions
from pallas_kernels.ragged_paged_attention.tpu_tuning import LANES, Tiles
from pallas_kernels.ragged_paged_attention.tpu_work import COUNT, POSITION, ROW, TOKEN, num_items

MASKED = -1e30
"""Score of an invisible key: finite. What a query adds up before it sees its first key, exp(MASKED - top) clears."""
UNROLLED_HEADS = 8
"""Decoding unrolls up to this many KV heads: each one's products are short, and overlap with the next one's."""
PHASE_BUFFERS = 6
"""What a phase keeps in VMEM, see ``phase_scratch``."""


def div(value: jax.Array, by: int) -> jax.Array:
    """Integer quotient of a value that is not negative: ``//`` would ask for its sign."""
    return jax.lax.div(value, jnp.int32(by))


def ceil_div(value: jax.Array, by: int) -> jax.Array:
    """The quotient rounded up."""
    return div(value + (by - 1), by)


@dataclass(frozen=True)
class _Shapes:
    """Static sizes of one call: query and KV heads, group, lanes, blocks a table, tokens a block and a chunk."""

    heads: int
    kv_heads: int
    lanes: int
    parts: int
    table_width: int
    block: int
    chunk: int
    cores: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


def attend(
    q: jax.Array,
    kv_cache: jax.Array,
    out: jax.Array,
    decodes: jax.Array,
    tiles: jax.Array,
    tables: jax.Array,
    sinks: jax.Array,
    options: AttentionOptions,
    sizes: Tiles,
    compute_dtype: Any,
    interpret: Any = False,
    scales: jax.Array | None = None,
) -> jax.Array:
    """Attend the items' queries; other tokens of ``out`` stay as they are.

    Args:
        q: float32 [T + query_tile, H, L].
        kv_cache: [num_blocks, P, K, block_size, L].
        out: float32 [T, H, L], updated in place.
        decodes, tiles: items of one query, and of up to ``sizes.query_tile``; a list without room leaves its code out.
        tables: int32 [R, B], the rows' blocks.
        sinks: float32 [K, G, 128] extra logits; ``MASKED`` where there are none.
        options: scale, window, soft cap.
        sizes: tile sizes.
        compute_dtype: type of the products' operands.
        interpret: ``pltpu.InterpretParams`` runs it on a CPU.
        scales: float32 [num_blocks, 2, K, block_size] of an int8 cache; blocks are whole rows of lanes then.

    Returns:
        ``out``.
    """
    _, parts, kv_heads, block, lanes = kv_cache.shape
    shapes = _Shapes(
        q.shape[1], kv_heads, lanes, parts, tables.shape[1], block, sizes.kv_chunk, sizes.cores
    )  # fmt: skip

    def phase_scratch(tile: int) -> list[Any]:
        rows = shapes.group * tile
        return [
            pltpu.VMEM((2, tile, shapes.heads, lanes), jnp.float32),  # queries as they arrive
            pltpu.VMEM((kv_heads, rows, lanes), compute_dtype),  # by KV head
            pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),  # top score
            pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),  # sum of weights
            pltpu.VMEM((kv_heads, rows, lanes), jnp.float32),  # weighted values
            pltpu.VMEM((2, tile, shapes.heads, lanes), jnp.float32),  # results as they leave
        ]

    anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
    scaled = scales is not None
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(sizes.cores,),
        in_specs=[anywhere, anywhere, pl.BlockSpec(memory_space=pltpu.VMEM), *[anywhere] * scaled, anywhere],
        out_specs=anywhere,
        scratch_shapes=[
            pltpu.VMEM((2, parts, kv_heads, sizes.kv_chunk, lanes), kv_cache.dtype),
            *[pltpu.VMEM((2, 2, kv_heads, sizes.kv_chunk), jnp.float32)] * scaled,
            pltpu.SemaphoreType.DMA((3, 2)),
            *phase_scratch(1),
            *(phase_scratch(sizes.query_tile) if num_items(tiles) else ()),
        ],
    )
    kernel = functools.partial(
        _kernel,
        shapes=shapes,
        options=options,
        most=(num_items(decodes), num_items(tiles)),
        tile=sizes.query_tile,
        scaled=scaled,
    )
    return pl.pallas_call(
        kernel,
        grid_spec=spec,
        out_shape=pltpu.HBM(out.shape, out.dtype),
        input_output_aliases={6 + scaled: 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel" if sizes.cores > 1 else "arbitrary",),
            vmem_limit_bytes=sizes.vmem_limit,
        ),
        name="ragged_paged_attention",
        interpret=interpret,
    )(
        decodes, tiles, tables.reshape(-1), in_hbm(q, interpret), in_hbm(kv_cache, interpret), sinks,
        *([in_hbm(scales, interpret)] if scaled else ()), out,
    )  # fmt: skip


def _kernel(decodes, tiles, tables, q, kv_cache, sinks, *refs, shapes, options, most, tile, scaled):
    """Decoding rows, then the others, if there may be any. ``_`` is ``out`` under its input's name."""
    scales_hbm, refs = (refs[0], refs[1:]) if scaled else (None, refs)
    _, out, kv, *refs = refs
    scales, refs = (refs[0], refs[1:]) if scaled else (None, refs)
    semaphores, *scratch = refs
    shared = (tables, q, kv_cache, scales_hbm, sinks, out, kv, scales, semaphores)
    _Phase(shapes, options, 1, most[0], decodes, *shared, *scratch[:PHASE_BUFFERS]).run()
    if most[1]:
        _Phase(shapes, options, tile, most[1], tiles, *shared, *scratch[PHASE_BUFFERS:]).run()


@dataclass(frozen=True)
class _Phase:
    """The items of one kind: ``tile`` queries at most, in a list with room for ``most``."""

    shapes: _Shapes
    options: AttentionOptions
    tile: int
    most: int
    items: Any
    tables: Any
    q_hbm: Any
    kv_hbm: Any
    scales_hbm: Any
    sinks: Any
    out_hbm: Any
    kv: Any
    scales: Any
    semaphores: Any
    arriving: Any
    queries: Any
    top: Any
    total: Any
    acc: Any
    leaving: Any

    def run(self) -> None:
        """Walk this core's items: every ``cores``-th one, so that long rows spread."""
        cores = self.shapes.cores
        core = pl.program_id(0)
        mine = ceil_div(self.items[0] - core, cores)

        @pl.when(mine > 0)
        def _():
            self._start_item(core, 0, 0)

        def item(number: jax.Array, step: jax.Array) -> jax.Array:
            index = core + number * cores
            return self._walk_item(index, number, number + 1 < mine, step)

        jax.lax.fori_loop(0, mine, item, jnp.int32(0))
        for back in (2, 1):  # what the last two items wrote is still on its way

            @pl.when(mine >= back)
            def _(back=back):
                number = mine - back
                self._results(core + number * cores, number & 1, "wait")

    def _field(self, field: int, index: jax.Array) -> jax.Array:
        return self.items[1 + field * self.most + index]

    def _visible(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Positions [begin, end) that any live query of the item sees."""
        first = self._field(POSITION, index)
        window = self.options.sliding_window
        begin = jnp.int32(0) if window is None else jnp.maximum(first - window + 1, 0)
        return begin, first + self._field(COUNT, index)

    def _start_item(self, index: jax.Array, queries_slot: Any, slot: Any) -> None:
        """Start to copy an item's queries and its first chunk."""
        self._queries_copy(index, queries_slot).start()
        self._each_block(
            index, div(self._visible(index)[0], self.shapes.chunk), slot, lambda copy: copy.start()
        )

    def _queries_copy(self, index: jax.Array, slot: Any) -> Any:
        source = self.q_hbm.at[pl.ds(self._field(TOKEN, index), self.tile)]
        return pltpu.make_async_copy(source, self.arriving.at[slot], self.semaphores.at[1, slot])

    def _each_block(self, index: jax.Array, chunk: jax.Array, slot: Any, do: Callable[[Any], Any]) -> None:
        """Apply ``do`` to the copy of each visible block of a chunk."""
        block, per_chunk = self.shapes.block, self.shapes.chunk // self.shapes.block
        begin, end = self._visible(index)
        first = jnp.maximum(div(begin, block), chunk * per_chunk)
        last = jnp.minimum(ceil_div(end, block), (chunk + 1) * per_chunk)
        table = self._field(ROW, index) * self.shapes.table_width

        def body(logical: jax.Array, carry: None) -> None:
            where = pl.multiple_of((logical - chunk * per_chunk) * block, block)
            target = self.kv.at[slot, :, :, pl.ds(where, block)]
            source = self.kv_hbm.at[self.tables[table + logical]]
            do(pltpu.make_async_copy(source, target, self.semaphores.at[0, slot]))
            if self.scales is not None:
                target = self.scales.at[slot, :, :, pl.ds(where, block)]
                source = self.scales_hbm.at[self.tables[table + logical]]
                do(pltpu.make_async_copy(source, target, self.semaphores.at[0, slot]))
            return carry

        jax.lax.fori_loop(first, last, body, None)

    def _results(self, index: jax.Array, slot: Any, action: str) -> None:
        """Start, or wait for, the copies of an item's live results: one for each bit of their number."""
        token, count = self._field(TOKEN, index), self._field(COUNT, index)
        size = self.tile
        while size:
            done = count & ~(2 * size - 1)  # larger bits are copied before

            @pl.when((count & size) != 0)
            def _(size=size, done=done):
                copy = pltpu.make_async_copy(
                    self.leaving.at[slot, pl.ds(done, size)],
                    self.out_hbm.at[pl.ds(token + done, size)],
                    self.semaphores.at[2, slot],
                )
                getattr(copy, action)()

            size //= 2

    def _walk_item(
        self, index: jax.Array, number: jax.Array, has_next: jax.Array, step: jax.Array
    ) -> jax.Array:
        """Compute one item; ``step`` counts chunks, and its parity says which half of the buffer holds one."""
        following = index + self.shapes.cores
        begin, end = self._visible(index)
        chunk = self.shapes.chunk
        last = ceil_div(end, chunk)
        self._queries_copy(index, number & 1).wait()
        self._begin(number & 1)

        def one_chunk(at: jax.Array, step: jax.Array) -> jax.Array:
            slot, other = step & 1, (step + 1) & 1

            @pl.when(at + 1 < last)
            def _():
                self._each_block(index, at + 1, other, lambda copy: copy.start())

            @pl.when((at + 1 == last) & has_next)
            def _():
                self._start_item(following, (number + 1) & 1, other)

            self._each_block(index, at, slot, lambda copy: copy.wait())
            self._clear_invisible(at, slot, begin, end)
            self._compute(index, at, slot)
            return step + 1

        step = jax.lax.fori_loop(div(begin, chunk), last, one_chunk, step)

        @pl.when(number >= 2)
        def _():
            self._results(index - 2 * self.shapes.cores, number & 1, "wait")

        self._finish(number & 1)
        self._results(index, number & 1, "start")
        return step

    def _begin(self, slot: jax.Array) -> None:
        """Regroup the queries by KV head, start the softmax: a sink is a key of that logit and no value."""
        group, tile = self.shapes.group, self.tile
        for head in range(self.shapes.kv_heads):
            if tile == 1:
                self.queries[head] = self.arriving[slot, 0, pl.ds(head * group, group)].astype(
                    self.queries.dtype
                )
                self.top[head] = self.sinks[head]
            else:
                for member in range(group):
                    rows = pl.ds(member * tile, tile)
                    part = self.arriving[slot, :, head * group + member, :]
                    self.queries[head, rows] = part.astype(self.queries.dtype)
                    self.top[head, rows] = jnp.broadcast_to(self.sinks[head, pl.ds(member, 1)], (tile, LANES))
            self.total[head] = jnp.where(self.top[head] == MASKED, 0.0, 1.0)
            self.acc[head] = jnp.zeros(self.acc.shape[1:], jnp.float32)

    def _clear_invisible(self, at: jax.Array, slot: jax.Array, begin: jax.Array, end: jax.Array) -> None:
        """Zero the values no query sees: they may never have been written and be NaN, and 0 * NaN is NaN.

        int8 knows no NaN; of its scales ``_compute`` takes care."""
        chunk = self.shapes.chunk
        if self.scales is not None:
            return

        @pl.when((at * chunk < begin) | ((at + 1) * chunk > end))
        def _():
            positions = at * chunk + jax.lax.broadcasted_iota(jnp.int32, (chunk, self.shapes.lanes), 0)
            keep = (positions >= begin) & (positions < end)

            def clear(head: Any) -> None:
                values = self.kv[slot, self.shapes.parts - 1, head].astype(jnp.float32)
                self.kv[slot, self.shapes.parts - 1, head] = jnp.where(keep, values, 0.0).astype(
                    self.kv.dtype
                )

            self._each_head(clear)

    def _compute(self, index: jax.Array, at: jax.Array, slot: jax.Array) -> None:
        """Scores of the chunk, online softmax, weighted values, for every KV head."""
        rows, chunk = self.shapes.group * self.tile, self.shapes.chunk
        keys = at * chunk + jax.lax.broadcasted_iota(jnp.int32, (rows, chunk), 1)
        # Rows of scores are ordered (member of the group, query); the tile is a power of two.
        query = jax.lax.broadcasted_iota(jnp.int32, (rows, chunk), 0) & (self.tile - 1)
        query = query + self._field(POSITION, index)
        visible = keys <= query
        if self.options.sliding_window is not None:
            visible &= keys > query - self.options.sliding_window
        begin, end = self._visible(index)
        seen = (keys[:1] >= begin) & (keys[:1] < end)
        dtype = self.queries.dtype
        precision = jax.lax.Precision.HIGHEST if dtype == jnp.float32 else None
        product = functools.partial(
            jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32
        )  # fmt: skip

        def head(number: Any) -> None:
            k = self.kv[slot, 0, number].astype(dtype)
            v = self.kv[slot, self.shapes.parts - 1, number].astype(dtype)
            scores = product(self.queries[number], k, (((1,), (1,)), ((), ()))) * self.options.scale
            if self.scales is not None:
                scores *= self.scales[slot, 0, pl.ds(number, 1)]
            if self.options.soft_cap is not None:
                scores = self.options.soft_cap * jnp.tanh(scores / self.options.soft_cap)
            scores = jnp.where(visible, scores, MASKED)
            old = self.top[number]
            new = jnp.maximum(old, jnp.max(scores, axis=1, keepdims=True))
            weights = jnp.exp(scores - new[:, :1])
            rescale = jnp.exp(old - new)
            self.top[number] = new
            self.total[number] = self.total[number] * rescale + jnp.sum(weights, axis=1, keepdims=True)
            if self.scales is not None:
                weights *= jnp.where(seen, self.scales[slot, 1, pl.ds(number, 1)], 0.0)
            added = product(weights.astype(dtype), v, (((1,), (0,)), ((), ())))
            self.acc[number] = self.acc[number] * rescale[:, :1] + added

        self._each_head(head)

    def _finish(self, slot: jax.Array) -> None:
        """Normalise, and order the results by token again."""
        group, tile = self.shapes.group, self.tile
        for head in range(self.shapes.kv_heads):
            result = self.acc[head] / self.total[head][:, :1]
            if tile == 1:
                self.leaving[slot, 0, pl.ds(head * group, group)] = result
            else:
                for member in range(group):
                    self.leaving[slot, :, head * group + member, :] = result[
                        member * tile : (member + 1) * tile
                    ]

    def _each_head(self, do: Callable[[Any], None]) -> None:
        if self.tile == 1 and self.shapes.kv_heads <= UNROLLED_HEADS:
            for number in range(self.shapes.kv_heads):
                do(number)
        else:
            pl.loop(0, self.shapes.kv_heads)(do)
