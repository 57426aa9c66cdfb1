"""What one compiled dense product is made for, which weights there can be one for, and the shared memory it takes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dense_matmul.gpu_tuning import ROWS, Config
from pallas_kernels.dense_matmul.gpu_work import Line, chunk_borders

MOST_FOLDED = 128
"""Tokens of a tile whose sums a warpgroup can hold twice."""
DTYPES = ("bfloat16", "float16")


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


@dataclass(frozen=True)
class Case:
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
    def has_partials(self) -> bool:
        """A chunk's sums are left for whoever adds them up."""
        return self.chunks > 1 and not self.folds

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


def scratch(case: Case, dtype: Any) -> dict[str, Any]:
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
