"""Which rows the Hopper dense product multiplies, and with what configuration: ``dispatch.DenseMatmul`` on Hopper.

``gpu_product`` is the product, and says the ideas behind it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu  # stored programs need its runtime, and tracing nothing imports nothing
import jax.numpy as jnp

from pallas_kernels.dense_matmul.gpu_case import supported
from pallas_kernels.dense_matmul.gpu_product import dense_matmul
from pallas_kernels.dense_matmul.gpu_tuning import (
    Config,
    chunks_of,
    invariant_multiplies,
    rows_from_table,
    tuned,
)
from pallas_kernels.hopper import multiprocessors


@dataclass(frozen=True)
class GpuDenseMatmul:
    """The kernel on Hopper; see ``dispatch.DenseMatmul``. Static in the compiled step.

    Args:
        num_sms: multiprocessors to fill; None asks the first device.
        config: instead of the tuning table's.
        always: used for any number of rows, not only where the table says so.
        invariant: one chunk for all shapes, used for all numbers of rows but those that the table leaves to XLA, which
            adds up in the same order there.
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
        """See ``DenseMatmul``; the tuning table decides."""
        if (reason := supported(outputs, inner, dtype, gated=gated)) is not None or self.always:
            return reason
        shape = outputs, inner, jnp.dtype(dtype).itemsize
        if self.invariant:
            multiplies = invariant_multiplies(num_rows, *shape, gated=gated, residual=residual)
        else:
            first, last = rows_from_table(*shape, gated=gated)
            multiplies = first <= num_rows <= last
        if not multiplies:
            return f"gpu_tuning.json leaves {num_rows} rows by {outputs} x {inner} to XLA"
        return None

    def for_all_rows(self) -> GpuDenseMatmul:
        """See ``DenseMatmul``."""
        return replace(self, invariant=True)

    def __call__(
        self, x: jax.Array, weight: jax.Array, *, residual: jax.Array | None = None, gated: bool = False,
        out_dtype: Any = None,
    ) -> jax.Array:  # fmt: skip
        """See ``DenseMatmul``. ValueError: what ``why_not`` says, or operands of two types."""
        if x.dtype != weight.dtype:
            raise ValueError(
                f"the Hopper dense product takes rows and weights of one type, not {x.dtype} and {weight.dtype}"
            )
        added = residual is not None
        reason = self.why_not(x.shape[0], *weight.shape, x.dtype, gated=gated, residual=added)
        if reason is not None:
            raise ValueError(reason)
        num_sms = multiprocessors(self.num_sms)
        num_rows = x.shape[0]
        chunks = self.chunks or (1 if self.invariant else chunks_of(*weight.shape))
        config = self.config or tuned(num_rows, *weight.shape, chunked=chunks > 1 and not gated, gated=gated)
        return _jitted(x, weight, residual, config, num_sms, gated, out_dtype, chunks, self.interpret)


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 6, 7, 8))
def _jitted(
    x: jax.Array, weight: jax.Array, residual: jax.Array | None, config: Config, num_sms: int, gated: bool,
    out_dtype: Any, chunks: int | None, interpret: Any,
) -> jax.Array:  # fmt: skip
    """Traced once for all layers of a step."""
    return dense_matmul(
        x, weight, config=config, num_sms=num_sms, residual=residual, gated=gated, out_dtype=out_dtype,
        chunks=chunks, interpret=interpret,
    )  # fmt: skip
