"""What one compiled prefill kernel is made for, and the shared memory it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.mosaic_gpu.primitives import whole_lines
from pallas_kernels.ragged_paged_attention.gpu_prefill_plan import CONSUMERS, ROWS, PrefillConfig, TileShape
from pallas_kernels.ragged_paged_attention.options import AttentionOptions


@dataclass(frozen=True)
class Case:
    """What one compiled kernel is made for."""

    config: PrefillConfig
    options: AttentionOptions
    shape: TileShape
    group: int
    head_size: int
    block_size: int
    has_sinks: bool
    num_ctas: int
    widens: bool
    """The cache is float8 or int8: tiles arrive in buffers of their own and are widened before they are used."""
    scaled: bool
    """Every key and value has a scale (int8)."""
    interpreted: bool
    """It runs where there is no product of registers with shared memory."""

    @property
    def query_buffers(self) -> int:
        """Of a tile each. What is widened arrives in memory of its own, where a second one would be."""
        return self.config.query_buffers if self.head_size <= 128 and not self.widens else 1

    @property
    def arriving(self) -> int:
        """Tiles in flight of those that are widened, 0 where none are."""
        return (2 if self.head_size <= 128 else 1) if self.widens else 0

    @property
    def blocks_per_step(self) -> int:
        """KV blocks, or parts of one, in a step."""
        return max(self.config.step // self.block_size, 1)

    @property
    def scales_together(self) -> int:
        """Tokens whose scales arrive in one piece, or in pieces that may lie side by side."""
        one_block = min(self.block_size, self.config.step)
        return self.config.step if whole_lines(one_block, jnp.float32) == one_block else one_block


def scratch(case: Case, dtype: Any, kv_dtype: Any) -> dict[str, Any]:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    step, stages, head_size = case.config.step, case.config.stages, case.head_size
    query_buffers, arriving, copies = case.query_buffers, case.arriving, case.blocks_per_step
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    scratch: dict[str, Any] = dict(
        q_s=plgpu.SMEM((query_buffers, CONSUMERS, ROWS, head_size), dtype, transforms=tiled),
        k_s=plgpu.SMEM((stages, step, head_size), dtype, transforms=tiled),
        v_s=plgpu.SMEM((stages, step, head_size), dtype, transforms=tiled),
        row_s=plgpu.SMEM((CONSUMERS, 16, head_size), dtype),
        k_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        v_edge=plgpu.Barrier(num_arrivals=copies),
        q_full=plgpu.Barrier(num_barriers=query_buffers),
        k_free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        v_free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        q_free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=query_buffers),
        turn=plgpu.Barrier(num_arrivals=CONSUMERS),
    )
    if case.widens:
        scratch["kv_in"] = plgpu.SMEM((arriving, step, head_size), kv_dtype)
        arrivals = 2 * copies if case.scaled else copies
        scratch["kv_arrived"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=arriving)
        if case.scaled:
            together = case.scales_together
            shape_in = arriving, step // together, whole_lines(together, jnp.float32)
            scratch["scales_in"] = plgpu.SMEM(shape_in, jnp.float32)
    if case.interpreted:
        scratch["p_s"] = plgpu.SMEM((CONSUMERS, ROWS, step), dtype, transforms=tiled)
    return scratch
