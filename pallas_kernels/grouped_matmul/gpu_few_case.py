"""What one compiled kernel for few tokens is made for, the shared memory it takes, and where its outputs lie."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.experimental import pallas as pl

from pallas_kernels.grouped_matmul.gpu_few_tuning import ROWS, FewConfig

ALIGNED = 8
"""Tokens come in such portions."""
SHARED_MEMORY = 232_448
"""Bytes of one CTA."""


@dataclass(frozen=True)
class Case:
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


def scratch(case: Case, dtype: Any) -> dict[str, Any]:
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


def block_of(case: Case, consumer: Any, block: int, half: int) -> Any:
    """Its number in a step's shared memory."""
    return (consumer * case.config.blocks + block) * case.halves + half


def output_of(case: Case, tile: Any, consumer: Any, block: int) -> tuple[Any, Any]:
    """Its first output, and whether there is such a one."""
    first = (tile * case.config.consumers + consumer) * (case.config.blocks * ROWS) + block * ROWS
    return pl.multiple_of(first, ROWS), first < case.outputs
