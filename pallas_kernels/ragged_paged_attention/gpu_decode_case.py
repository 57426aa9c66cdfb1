"""What one compiled decode kernel is made for, and the shared memory it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from pallas_kernels.mosaic_gpu.primitives import whole_lines
from pallas_kernels.ragged_paged_attention.gpu_decode_plan import DecodeConfig, blocks_per_step
from pallas_kernels.ragged_paged_attention.options import AttentionOptions


@dataclass(frozen=True)
class Case:
    """What one compiled kernel is made for."""

    config: DecodeConfig
    options: AttentionOptions
    group: int
    columns: int
    head_size: int
    block_size: int
    writes_all_rows: bool
    has_sinks: bool
    atomic: bool
    widens: bool
    """The cache is float8 or int8: tiles arrive in buffers of their own and are widened before they are used."""
    scaled: bool
    """Every key and value has a scale (int8)."""

    @property
    def queries_fill_tiles(self) -> bool:
        """A group's heads begin at a multiple of 8 and are one: the copy engine can bring them as the product wants."""
        return self.group == self.columns

    @property
    def merges_halves(self) -> bool:
        # A window takes the registers that this would.
        fits = self.group <= 4 and self.head_size % 128 == 0 and self.options.sliding_window is None
        return self.config.halves and fits

    @property
    def scales_together(self) -> int:
        """Tokens whose scales arrive in one piece, or in pieces that may lie side by side."""
        one_block = min(self.block_size, self.config.step)
        return self.config.step if whole_lines(one_block, jnp.float32) == one_block else one_block

    @property
    def merge_width(self) -> int:
        """Partial results loaded at a time when a sequence is merged: as many as registers allow."""
        registers = self.columns * self.head_size // (256 if self.merges_halves else 128) + self.columns // 2
        merge = self.config.merge if self.options.sliding_window is None else self.config.merge - 2
        return max(12 * merge // registers, 1)


def scratch(case: Case, dtype: Any, kv_dtype: Any) -> dict[str, Any]:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    columns, head_size, step, stages = case.columns, case.head_size, case.config.step, case.config.stages
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    copies = (2 if case.scaled else 1) * blocks_per_step(step, case.block_size)
    tiles = 1 if case.widens else stages
    arriving = plgpu.SMEM((stages, step, head_size), kv_dtype)
    return dict(
        k_s=plgpu.SMEM((tiles, step, head_size), dtype, transforms=tiled),
        v_s=plgpu.SMEM((tiles, step, head_size), dtype, transforms=tiled),
        **(dict(k_in=arriving, v_in=arriving) if case.widens else {}),
        **(dict(scales_in=plgpu.SMEM(_scales_shape(case), jnp.float32)) if case.scaled else {}),
        # This piece's queries and the next one's; or only this one's, and both as they come, with rows to read past
        # the second group's end.
        **(
            dict(q_s=plgpu.SMEM((2, columns, head_size), dtype, transforms=tiled))
            if case.queries_fill_tiles
            else dict(
                q_s=plgpu.SMEM((1, columns, head_size), dtype, transforms=tiled),
                q_in=plgpu.SMEM((case.group + columns, head_size), dtype),
            )
        ),
        new_s=plgpu.SMEM((2, 2, whole_lines(head_size, kv_dtype)), kv_dtype),
        weights_or_count=plgpu.RefUnion(
            plgpu.SMEM((columns, step), dtype, transforms=tiled), plgpu.SMEM((1,), jnp.int32)
        ),
        k_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        v_full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
        q_full=plgpu.Barrier(num_barriers=2),
        new_full=plgpu.Barrier(num_arrivals=2, num_barriers=2),
    )


def _scales_shape(case: Case) -> tuple[int, ...]:
    """Of the scales that arrive: stages, keys or values, and a step's tokens in rows of ``scales_together``."""
    together = case.scales_together
    return case.config.stages, 2, case.config.step // together, whole_lines(together, jnp.float32)
