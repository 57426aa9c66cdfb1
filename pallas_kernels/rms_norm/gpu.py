"""RMS norm for Hopper (Mosaic GPU): one warpgroup a row, so a row's bits depend on that row alone.

XLA picks warps, rows and columns of its norms by the number of rows, and with them the order of the sums. Here one
kernel, compiled once, serves every number of rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu  # stored programs need its runtime, and tracing nothing imports nothing
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper import multiprocessors
from pallas_kernels.mosaic_gpu.launch import launch
from pallas_kernels.mosaic_gpu.primitives import store

THREADS = 128
FEW = 2
"""CTAs (thread blocks) started on each multiprocessor where there are no more rows than these."""
LONGEST = 16_384
"""Elements of a row: 128 a thread, all in registers."""


@dataclass(frozen=True)
class GpuRMSNorm:
    """The kernel. Stateless; static in the compiled step.

    Args:
        num_sms: multiprocessors to fill; None asks the first device.
        ctas_per_sm: rows in work at once on each.
        interpret: ``plgpu.InterpretGPUParams`` to run on a CPU, for tests.
    """

    num_sms: int | None = None
    ctas_per_sm: int = 8
    interpret: Any = None

    name = "mosaic_gpu"

    def why_not(self, size: int, dtype: Any) -> str | None:
        """None where it normalises rows of ``size`` elements, else why not."""
        if size % THREADS or size > LONGEST:
            return f"rows of {size} elements: it takes multiples of {THREADS} up to {LONGEST}"
        if jnp.dtype(dtype).name not in ("bfloat16", "float16"):
            return f"{jnp.dtype(dtype).name}: it takes bfloat16 and float16"
        return None

    def __call__(self, x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
        """[T, M] by weight [M]: each row to unit root mean square, rounded to x's type, times the weight."""
        sms = multiprocessors(self.num_sms)
        few = FEW * sms  # as many as have a row are started soonest
        num_ctas = few if x.shape[0] <= few else sms * self.ctas_per_sm
        return _normalise(x, weight, eps, num_ctas, self.interpret)


MOST_ROWS = 7
"""From 8 rows on XLA's norm is one kernel too."""


@dataclass(frozen=True)
class GpuAddNorm:
    """Sum of two and its norm, of very few rows, each a warpgroup's. Stateless; static in the compiled step.

    XLA makes two kernels of a single row's norm, each of which takes about as long as it takes to start.

    Args:
        interpret: ``plgpu.InterpretGPUParams`` to run on a CPU, for tests.
    """

    interpret: Any = None

    def why_not(self, num_rows: int, size: int, dtype: Any) -> str | None:
        """Why so many rows of ``size`` elements are left to XLA; None: they are not."""
        if num_rows > MOST_ROWS:
            return f"{num_rows} rows: it takes up to {MOST_ROWS}"
        return GpuRMSNorm().why_not(size, dtype)

    def __call__(
        self, partial: jax.Array, residual: jax.Array, weights: jax.Array, layer: jax.Array, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """The sum of two [T, M], rounded to their type, and its norm as ``GpuRMSNorm`` has it.

        Args:
            partial, residual: the two.
            weights: [L, M]. XLA would cut a layer's out of them with a kernel, or a part of a CUDA graph.
            layer: int32[1], whose weight.
            eps: added to the mean square.
        """
        return _add_and_normalise(partial, residual, weights, layer, eps, self.interpret)


@functools.partial(jax.jit, static_argnums=(4, 5))
def _add_and_normalise(
    partial: jax.Array, residual: jax.Array, weights: jax.Array, layer: jax.Array, eps: float, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    rows, size = partial.shape
    load = functools.partial(plgpu.load, layout=_layout(size), optimized=False)

    def add_norm(partial, residual, weights, layer, total, normal):
        row = lax.axis_index("row")
        scale = load(weights.at[layer[0]])
        wide = load(partial.at[row]).astype(jnp.float32) + load(residual.at[row]).astype(jnp.float32)
        rounded = wide.astype(partial.dtype)
        store(total.at[row], rounded)
        wide = rounded.astype(jnp.float32)
        unit = wide * lax.rsqrt(jnp.sum(wide * wide) * (1.0 / size) + eps)
        store(normal.at[row], unit.astype(partial.dtype) * scale)

    build = functools.partial(
        plgpu.kernel, add_norm,
        grid=(rows,), grid_names=("row",), kernel_name="add_norm",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=1024), interpret=interpret,
    )  # fmt: skip
    total, normal = launch(
        lambda out_type: build(out_type=out_type), ("add_norm", eps, rows), [partial, residual, weights, layer], [],
        (jax.ShapeDtypeStruct(partial.shape, partial.dtype),) * 2, batched=[0, 1, 4, 5], interpret=interpret,
    )  # fmt: skip
    return total, normal


def _layout(size: int) -> Any:
    """A row of ``size`` elements over a warpgroup."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    vector = next(width for width in (8, 4, 2, 1) if size % (THREADS * width) == 0)
    return plgpu.Layout.WG_STRIDED((size,), vec_size=vector)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _normalise(x: jax.Array, weight: jax.Array, eps: float, num_ctas: int, interpret: Any) -> jax.Array:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    size = x.shape[1]
    layout = _layout(size)

    def rms_norm(x, weight, num_rows, out):
        cta = lax.axis_index("cta")

        @pl.when(cta < num_rows[0])
        def _rows():
            scale = plgpu.load(weight, layout=layout, optimized=False)

            def one_row(turn, _):
                row = cta + turn * num_ctas
                wide = plgpu.load(x.at[row], layout=layout, optimized=False).astype(jnp.float32)
                mean = jnp.sum(wide * wide) * (1.0 / size)
                normal = wide * lax.rsqrt(mean + eps)
                store(out.at[row], normal.astype(x.dtype) * scale)

            lax.fori_loop(0, pl.cdiv(num_rows[0] - cta, num_ctas), one_row, None)

    build = functools.partial(
        plgpu.kernel, rms_norm,
        grid=(num_ctas,), grid_names=("cta",), kernel_name="rms_norm",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=1024), interpret=interpret,
    )  # fmt: skip
    rows = jnp.full((1,), x.shape[0], jnp.int32)
    (out,) = launch(
        lambda out_type: build(out_type=out_type), ("rms_norm", eps, num_ctas), [x, weight, rows], [],
        (jax.ShapeDtypeStruct(x.shape, x.dtype),), batched=[0, 3], interpret=interpret,
    )  # fmt: skip
    return out
