"""Norm, rotation and splitting of heads for Hopper (Mosaic GPU), in one kernel: one warpgroup a head.

XLA makes three or four kernels of it, which at few rows cost what they are started for. One module serves every number
of tokens.
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
from pallas_kernels.mosaic_gpu.primitives import store, warpgroup_barrier

HEAD_SIZE = 128
"""Elements of a head: one a thread."""
MOST_TOKENS = 128
"""Beyond them a step is long enough, and XLA's kernels use memory better."""


@dataclass(frozen=True)
class GpuSplitHeads:
    """The kernel. Stateless; static in the compiled step.

    Args:
        num_sms: multiprocessors to fill; None asks the first device.
        ctas_per_sm: heads in work at once on each.
        interpret: ``plgpu.InterpretGPUParams`` to run on a CPU, for tests.
    """

    num_sms: int | None = None
    ctas_per_sm: int = 12
    interpret: Any = None

    def why_not(self, num_tokens: int, head_size: int, dtype: Any) -> str | None:
        """Why so many tokens are left to XLA; None: they are not."""
        if num_tokens > MOST_TOKENS:
            return f"{num_tokens} tokens: it is faster up to {MOST_TOKENS}"
        if head_size != HEAD_SIZE:
            return f"heads of {head_size} elements: it takes {HEAD_SIZE}"
        if jnp.dtype(dtype).name not in ("bfloat16", "float16"):
            return f"{jnp.dtype(dtype).name}: it takes bfloat16 and float16"
        return None

    def __call__(
        self, qkv: jax.Array, cos: jax.Array, sin: jax.Array, weights: jax.Array | None, eps: float
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """See ``dispatch.SplitHeads``."""
        sms = multiprocessors(self.num_sms)
        return _split(qkv, cos, sin, weights, eps, sms * self.ctas_per_sm, self.interpret)


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def _split(
    qkv: jax.Array, cos: jax.Array, sin: jax.Array, weights: jax.Array | None, eps: float, num_ctas: int,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_tokens, kv_heads, slots, size = qkv.shape
    group, dtype = slots - 2, qkv.dtype
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=1)
    load = functools.partial(plgpu.load, layout=layout, optimized=False)

    def split_heads(*refs: Any) -> None:
        (qkv, angles, *scales, num_heads, q, k, v), twice = refs[:-1], refs[-1]
        cta = lax.axis_index("cta")

        def turned(head: jax.Array, token: jax.Array, scale: jax.Array | None) -> jax.Array:
            wide = head.astype(jnp.float32)
            if scale is not None:
                normal = wide * lax.rsqrt(jnp.sum(wide * wide) * (1.0 / size) + eps)
                wide = (normal.astype(dtype) * scale).astype(jnp.float32)
            # Two copies in a row: from its middle on, they are the head with its halves exchanged.
            warpgroup_barrier(compiled=interpret is None)
            store(twice.at[pl.ds(0, size)], wide)
            store(twice.at[pl.ds(size, size)], wide)
            warpgroup_barrier(compiled=interpret is None)
            other = load(twice.at[pl.ds(size // 2, size)])
            return (wide * load(angles.at[token, 0]) + other * load(angles.at[token, 1])).astype(dtype)

        def one_head(turn: jax.Array, _: None) -> None:
            index = cta + turn * num_ctas
            slot, row = index % slots, index // slots
            token, kv_head = row // kv_heads, row % kv_heads
            values = load(qkv.at[token, kv_head, slot])

            @pl.when(slot < group)
            def _query() -> None:
                scale = load(scales[0].at[0]) if scales else None
                store(q.at[token, kv_head, slot], turned(values, token, scale))

            @pl.when(slot == group)
            def _key() -> None:
                scale = load(scales[0].at[group]) if scales else None
                store(k.at[token, kv_head], turned(values, token, scale))

            @pl.when(slot > group)
            def _value() -> None:
                store(v.at[token, kv_head], values)

        lax.fori_loop(0, pl.cdiv(num_heads[0] - cta, num_ctas), one_head, None)

    build = functools.partial(
        plgpu.kernel, split_heads,
        grid=(num_ctas,), grid_names=("cta",), kernel_name="split_heads",
        scratch_types=(plgpu.SMEM((2 * size,), jnp.float32),),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=1024), interpret=interpret,
    )  # fmt: skip
    # The second half turns against the first.
    angles = jnp.stack([jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)], axis=1)
    scales = [] if weights is None else [weights]
    heads = jnp.full((1,), num_tokens * kv_heads * slots, jnp.int32)
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    outputs = (
        shape((num_tokens, kv_heads, group, size)), shape((num_tokens, kv_heads, size)),
        shape((num_tokens, kv_heads, size)),
    )  # fmt: skip
    operands = [qkv, angles, *scales, heads]
    first = len(operands)
    q, k, v = launch(
        lambda out_type: build(out_type=out_type), ("split_heads", eps, num_ctas), operands, [], outputs,
        batched=[0, 1, first, first + 1, first + 2], interpret=interpret,
    )  # fmt: skip
    return q.reshape(num_tokens, kv_heads * group, size), k, v
