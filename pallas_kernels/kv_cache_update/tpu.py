"""Writing new keys and values into the paged cache on TPU (Mosaic), in place.

Packed types cannot be written a token at a time: their rows share sublanes. So the kernel walks the touched tiles
(``write_tile`` consecutive slots of a block, all heads): read, replace the new tokens' rows, write back, with the
next tile's read and the last one's write under way meanwhile. Tokens arrive in float32 with the token as a major
dimension, so that a tile's rows are fetched from wherever they start.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


def write_tile(dtype: Any) -> int:
    """Slots of a tile: the rows that a packed tile of memory has; block sizes are multiples of it."""
    return 32 if jnp.dtype(dtype).itemsize == 1 else 16


def kv_cache_update(
    kv_cache: jax.Array, new: jax.Array, slot_mapping: jax.Array, num_rows: int, interpret: Any = False
) -> jax.Array:
    """Write new tokens; the cache is aliased to the result.

    Args:
        kv_cache: [num_blocks, P, K, block_size, L].
        new: [T, P, K, L], any float type, or the cache's: within its range, no rounding mode is chosen here.
        slot_mapping: [T] int32 flat slots, no slot twice; out of range drops the write. Slots of a tile that several
            runs of consecutive tokens write must not be interleaved with other tiles' (rows own their blocks).
        num_rows: R, at most this many runs of consecutive slots.
        interpret: ``pltpu.InterpretParams`` runs it on a CPU.

    Returns:
        The updated cache.
    """
    _, parts, kv_heads, block, lanes = kv_cache.shape
    tile = write_tile(kv_cache.dtype)
    tiles = write_tiles(slot_mapping, kv_cache.shape[0] * block, num_rows, tile)
    tokens = new.astype(jnp.float32).reshape(new.shape[0], parts * kv_heads, lanes)
    tokens = jnp.pad(tokens, ((tile, tile), (0, 0), (0, 0)))
    hbm = pl.BlockSpec(memory_space=pltpu.HBM)
    spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(1,),
        in_specs=[hbm, hbm],
        out_specs=hbm,
        scratch_shapes=[
            pltpu.VMEM((2, tile, parts * kv_heads, lanes), jnp.float32),
            pltpu.VMEM((2, parts, kv_heads, tile, lanes), kv_cache.dtype),
            pltpu.VMEM((2, parts, kv_heads, tile, lanes), kv_cache.dtype),
            pltpu.SemaphoreType.DMA((3, 2)),
        ],
    )
    return pl.pallas_call(
        functools.partial(_kernel, block=block, most=(tiles.shape[0] - 1) // 3),
        grid_spec=spec,
        out_shape=pltpu.HBM(kv_cache.shape, kv_cache.dtype),
        input_output_aliases={2: 0},
        name="kv_cache_update",
        interpret=interpret,
    )(tiles, in_hbm(tokens, interpret), kv_cache)


def in_hbm(operand: jax.Array, interpret: Any) -> jax.Array:
    """Pin an operand to HBM: a BlockSpec tells the kernel where it is, but does not keep XLA from choosing VMEM."""
    return operand if interpret else pltpu.with_memory_space_constraint(operand, pltpu.HBM)


def write_tiles(slot_mapping: jax.Array, num_slots: int, num_rows: int, tile: int) -> jax.Array:
    """int32 [1 + 3 * most]: how many tiles are touched, then each one's first token, its slot, and its new tokens."""
    num_tokens = slot_mapping.shape[0]
    most = min(num_tokens, num_tokens // tile + 2 * num_rows)
    valid = (slot_mapping >= 0) & (slot_mapping < num_slots)
    before = jnp.concatenate([jnp.full((1,), -2, jnp.int32), jnp.where(valid, slot_mapping, -2)[:-1]])
    first = valid & ((slot_mapping != before + 1) | (slot_mapping % tile == 0))
    number = jnp.cumsum(first, dtype=jnp.int32) - 1
    counts = jnp.zeros(most, jnp.int32).at[jnp.where(valid, number, most)].add(1, mode="drop")
    where = jnp.where(first, number, most)
    tokens = jnp.zeros(most, jnp.int32).at[where].set(jnp.arange(num_tokens, dtype=jnp.int32), mode="drop")
    return jnp.concatenate([number[-1:] + 1, tokens, slot_mapping[tokens], counts])


def _kernel(tiles, tokens_hbm, _, cache_hbm, arriving, reading, writing, semaphores, *, block, most):
    """Walk the tiles. ``_`` is the cache under its input's name."""
    num_tiles = tiles[0]
    _, parts, kv_heads, tile, lanes = reading.shape

    def place(index: jax.Array) -> Any:
        slot = tiles[1 + most + index]
        offset = pl.multiple_of(slot & (block - tile), tile)  # powers of two
        return cache_hbm.at[jax.lax.div(slot, jnp.int32(block)), :, :, pl.ds(offset, tile)]

    def reads(index: jax.Array, half: Any) -> tuple[Any, Any]:
        # Row i of the tile is token i of what arrives; what lies before and after is another's, and is not used.
        begin = tiles[1 + index] - (tiles[1 + most + index] & (tile - 1)) + tile
        new = tokens_hbm.at[pl.ds(begin, tile)]
        return (
            pltpu.make_async_copy(new, arriving.at[half], semaphores.at[0, half]),
            pltpu.make_async_copy(place(index), reading.at[half], semaphores.at[1, half]),
        )

    def write(index: jax.Array, half: Any) -> Any:
        return pltpu.make_async_copy(writing.at[half], place(index), semaphores.at[2, half])

    @pl.when(num_tiles > 0)
    def _():
        for copy in reads(0, 0):
            copy.start()

    def one_tile(index: jax.Array, carry: None) -> None:
        half = index & 1

        @pl.when(index + 1 < num_tiles)
        def _():
            for copy in reads(index + 1, (index + 1) & 1):
                copy.start()

        for copy in reads(index, half):
            copy.wait()

        @pl.when(index >= 2)
        def _():
            write(index - 2, half).wait()

        first = tiles[1 + most + index] & (tile - 1)
        rows = jax.lax.broadcasted_iota(jnp.int32, (tile, lanes), 0)
        replaced = (rows >= first) & (rows < first + tiles[1 + 2 * most + index])
        for part in range(parts):
            for head in range(kv_heads):
                new = arriving[half, :, part * kv_heads + head, :]
                old = reading[half, part, head].astype(jnp.float32)
                writing[half, part, head] = jnp.where(replaced, new, old).astype(writing.dtype)
        write(index, half).start()
        return carry

    jax.lax.fori_loop(0, num_tiles, one_tile, None)
    for back in (2, 1):

        @pl.when(num_tiles >= back)
        def _(back=back):
            write(num_tiles - back, (num_tiles - back) & 1).wait()
