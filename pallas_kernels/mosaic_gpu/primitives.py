"""Small pieces of Mosaic GPU the kernels share: stores, a barrier, whole lines of memory, an atomic counter."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

LINE = 128
"""Bytes: the copy engine reads and writes shared memory only from a multiple of these on. Nothing but the card checks
it, and it ends the process' CUDA context ("misaligned address")."""


def whole_lines(length: int, dtype: Any) -> int:
    """Elements, ``length`` or more, after which another copy may arrive in shared memory."""
    per_line = LINE // jnp.dtype(dtype).itemsize
    return -(-length // per_line) * per_line


def store(ref: Any, value: jax.Array) -> None:
    """Store to shared or global memory where bank conflicts or part lines do not matter.

    Since jax 0.12 a plain assignment refuses a store that has them; before, it does not.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def warpgroup_barrier(*, compiled: bool) -> None:
    """Wait for the other warps of the warpgroup, in a kernel that leaves no barriers to the compiler."""
    if not compiled:
        return
    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.pallas import mosaic_gpu as plgpu

    @plgpu.inline_mgpu()
    def barrier(ctx: Any) -> None:
        del ctx
        utils.warpgroup_barrier()

    barrier()


def copy_layout(rows: int, head_size: int) -> Any:
    """Registers of one warpgroup for moving [rows, head_size] values of 16 bits between global and swizzled memory.

    A warp moves whole 128-byte lines, 16 bytes a lane (8 where there are fewer than 1,024 values).
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if rows % 16 == 0:
        tiles, warps = ((16, 64), (4, 64), (8,)), (-5,)
    elif head_size % 128 == 0:
        tiles, warps = ((8, 128), (4, 64), (8,)), (-5, -4)
    else:
        tiles, warps = ((8, 64), (2, 64), (4,)), (-5,)
    return plgpu.Layout.TILED(plgpu.Tiling(tiles), warp_dims=warps, lane_dims=(-3, -2), vector_dim=-1)


def add_and_fetch(counter: Any, scratch: Any, value: jax.Array, *, atomic: bool) -> jax.Array:
    """Add ``value`` to an int32 counter in global memory; returns what it held before.

    What this CTA wrote before is visible to whoever finds its addition in the counter, and the other way round.
    Interpret mode runs one CTA after another, so there the addition need not be atomic.

    Args:
        counter: [1] reference in global memory.
        scratch: [1] int32 reference in shared memory, to hand the result to all threads.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not atomic:
        before = counter[0]
        counter[0] = before + value
        return before

    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.mosaic.gpu.utils import ThreadSubset
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import arith, llvm, memref

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
    def add(ctx: Any, counter: Any, scratch: Any, value: Any) -> None:
        del ctx
        i32 = ir.IntegerType.get_signless(32)
        utils.warpgroup_barrier()
        with utils.single_thread(scope=ThreadSubset.WARPGROUP):
            before = llvm.inline_asm(
                i32, [utils.memref_ptr(counter), value.registers.item()],
                "atom.global.acq_rel.gpu.add.u32 $0, [$1], $2;", "=r,l,r", has_side_effects=True,
            )  # fmt: skip
            memref.store(before, scratch, [arith.constant(ir.IndexType.get(), 0)])
        utils.warpgroup_barrier()

    add(counter, scratch, value)
    return scratch[0]


def fence_async() -> None:
    """Order what this thread did in global memory, and has seen of others' there, with the copy engine's accesses."""
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir.dialects import llvm

    @plgpu.inline_mgpu()
    def fence(ctx: Any) -> None:
        del ctx
        llvm.inline_asm(None, [], "fence.proxy.async;", "", has_side_effects=True)

    fence()
