"""Handing something from one CTA to another through a flag in global memory, and a store of sums in columns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def signal(flag: Any, *, atomic: bool) -> None:
    """Set an int32 flag in global memory, once what this warpgroup wrote before can be seen; see ``wait_for``.

    Args:
        flag: [1] reference.
        atomic: as the hardware needs it; interpret mode runs one CTA after another and only assigns.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not atomic:
        flag[0] = jnp.int32(1)
        return

    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.mosaic.gpu.utils import ThreadSubset
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def set_flag(ctx: Any, flag: Any) -> None:
        del ctx
        utils.warpgroup_barrier()
        with utils.single_thread(scope=ThreadSubset.WARPGROUP):
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), [utils.memref_ptr(flag)],
                "fence.acq_rel.gpu; st.release.gpu.global.u32 [$0], 1;", "l", has_side_effects=True,
            )  # fmt: skip

    set_flag(flag)


def wait_for(flag: Any, *, atomic: bool) -> None:
    """Wait until another CTA sets a flag: what that one wrote before can be read then. The flag stays set.

    In interpret mode the CTA that sets it must come first.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not atomic:
        return

    from jax.experimental.mosaic.gpu import utils
    from jax.experimental.mosaic.gpu.utils import ThreadSubset
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import llvm

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(ctx: Any, flag: Any) -> None:
        del ctx
        with utils.single_thread(scope=ThreadSubset.WARPGROUP):
            llvm.inline_asm(
                ir.Type.parse("!llvm.void"), [utils.memref_ptr(flag)],
                "{ .reg .pred unset; .reg .u32 seen; AGAIN: ld.acquire.gpu.global.u32 seen, [$0]; "
                "setp.eq.u32 unset, seen, 0; @unset bra AGAIN; fence.acq_rel.gpu; }", "l", has_side_effects=True,
            )  # fmt: skip
        utils.warpgroup_barrier()

    wait(flag)


def store_transposed(ref: Any, value: jax.Array, *, direct: bool) -> None:
    """Store float32 sums [rows, columns] (layout WGMMA) to [columns, rows] of global memory, in 32-byte pieces.

    Args:
        direct: as the hardware does it; interpret mode only assigns.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if not direct:
        ref[...] = value.T
        return

    from jaxlib.mlir.dialects import memref

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WGMMA))
    def put(ctx: Any, ref: Any, value: Any) -> None:
        del ctx
        value.foreach(lambda each, at: memref.store(each, ref, [at[1], at[0]]))

    put(ref, value)
