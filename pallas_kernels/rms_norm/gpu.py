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

from pallas_kernels.ragged_paged_attention.gpu_launch import launch
from pallas_kernels.ragged_paged_attention.gpu_primitives import store

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
        sms = self.num_sms if self.num_sms is not None else jax.local_devices()[0].core_count
        few = FEW * sms  # as many as have a row are started soonest
        num_ctas = few if x.shape[0] <= few else sms * self.ctas_per_sm
        return _normalise(x, weight, eps, num_ctas, self.interpret)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _normalise(x: jax.Array, weight: jax.Array, eps: float, num_ctas: int, interpret: Any) -> jax.Array:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    size = x.shape[1]
    vector = next(width for width in (8, 4, 2, 1) if size % (THREADS * width) == 0)
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=vector)

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
        plgpu.kernel, rms_norm, grid=(num_ctas,), grid_names=("cta",), kernel_name="rms_norm",
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=1024), interpret=interpret,
    )  # fmt: skip
    rows = jnp.full((1,), x.shape[0], jnp.int32)
    (out,) = launch(
        lambda out_type: build(out_type=out_type), ("rms_norm", eps, num_ctas), [x, weight, rows], [],
        (jax.ShapeDtypeStruct(x.shape, x.dtype),), batched=[0, 3], interpret=interpret,
    )  # fmt: skip
    return out
