"""Dense products for Hopper (Mosaic GPU): bfloat16 or float16 rows and weights, sums in float32.

Central ideas:

* Products are computed transposed: a weight's outputs are the 64-row side of the tensor core's instruction, tokens are
  its columns, of which there may be as few as 8. A tile is 64 outputs, or 128 (two multiplying warpgroups), and all
  tokens, or 256 of many: each weight is read once. One warpgroup loads, running ahead over the ends of items.
* Every multiprocessor gets the same number of steps, whatever divides what (``gpu_work``). Where there are too few
  outputs for that, the contracted dimension is cut into chunks, whose sums the last one to finish adds up in order.
* A row's bits depend on the weight's shape alone: the order of sums is fixed by the chunks, and these by the shape.
  Neither the number of rows nor the configuration or the number of multiprocessors has a part in it. ``for_all_rows``
  has one chunk whatever the shape.
* What follows a product in a layer happens where its sums are: adding the residual, silu(gate) * up.
* CTAs of a cluster may share the rows that they all need: each loads a part and sends it to all.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.dense_matmul.gpu_case import Case, scratch
from pallas_kernels.dense_matmul.gpu_kernel import kernel_body
from pallas_kernels.dense_matmul.gpu_tuning import ALIGNED, ROWS, Config, chunks_of
from pallas_kernels.mosaic_gpu.launch import launch

MANY = 4096
"""Counters come in so many, which will do for all kernels with few tokens."""


def dense_matmul(
    x: jax.Array, weight: jax.Array, *, config: Config, num_sms: int, residual: jax.Array | None = None,
    gated: bool = False, out_dtype: Any = None, chunks: int | None = None, interpret: Any = None,
) -> jax.Array:  # fmt: skip
    """[T, N], or [T, N / 2] with ``gated``; see ``reference``. Sums in float32, rounded to ``out_dtype`` (x's).

    Args:
        x: [T, K].
        weight: [N, K] of the same type; N and K multiples of 64.
        num_sms: multiprocessors to fill.
        residual: [T, N] of x's type.
        chunks: instead of the shape's own; then the bits are others.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_rows, (outputs, inner) = x.shape[0], weight.shape
    token_tiles = pl.cdiv(num_rows, config.width)
    out_dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    if out_dtype != x.dtype and (out_dtype != jnp.float32 or gated or residual is not None):
        raise ValueError(
            f"a product of {x.dtype} is rounded to that, or to float32 without gate and residual, not {out_dtype}"
        )
    # The copy engine leaves out rows that are not there, where there is one tile of them.
    cut = token_tiles == 1 and (num_rows <= ALIGNED or num_rows % ALIGNED == 0)
    cut = cut and interpret is None and out_dtype == x.dtype
    rows = num_rows if cut else token_tiles * config.width
    if rows != num_rows:
        pad = ((0, rows - num_rows), (0, 0))
        x, residual = jnp.pad(x, pad), None if residual is None else jnp.pad(residual, pad)
    chunks = chunks_of(outputs, inner) if chunks is None else chunks
    if gated and config.consumers != 2:
        config = replace(config, consumers=2)
    case = Case(
        config, outputs, inner, 1 if gated else chunks, token_tiles > 1, num_sms // config.cluster, gated,
        residual is not None, out_dtype.name, atomic=interpret is None,
    )  # fmt: skip
    # Zero before and after every call. They are changed behind XLA's back, which would copy them for each call if it
    # knew: kernels of a program follow one another, so that all of them may use the same.
    # They have one size, so that all of a program's are one array.
    num_counters = case.num_handed + case.num_sums(token_tiles)
    counters = jnp.zeros(pl.cdiv(num_counters, MANY) * MANY, jnp.int32)
    operands, refs = [x, weight] + ([residual] if residual is not None else []), []
    batched = [0] + ([2] if residual is not None else [])
    if case.many_tokens:
        operands.append(jnp.full(4, token_tiles, jnp.int32))
    if interpret is None:
        operands.append(counters)
    else:
        refs.append(jax.new_ref(counters))
    batched += [len(operands) + len(refs) - 1, len(operands) + len(refs)]
    out_type = (jax.ShapeDtypeStruct((rows, outputs // 2 if gated else outputs), out_dtype),)
    if case.shares_chunks:
        out_type += (jax.ShapeDtypeStruct((case.num_handed, ROWS, config.width), jnp.float32),)
    if case.has_partials:
        batched.append(len(operands) + len(refs) + len(out_type))
        num_partials = case.num_sums(token_tiles) * chunks
        out_type += (jax.ShapeDtypeStruct((num_partials, ROWS, config.width), jnp.float32),)
    clusters: dict[str, Any] = {}
    if config.cluster > 1:
        clusters = dict(cluster=(config.cluster,), cluster_names=("cluster",))
    build = functools.partial(
        plgpu.kernel,
        kernel_body(case, x.dtype),
        grid=(case.num_workers,),
        grid_names=("worker",),
        num_threads=config.consumers + 1,
        thread_name="warpgroup",
        scratch_types=scratch(case, x.dtype),
        kernel_name="dense_matmul",
        interpret=interpret,
        **clusters,
    )
    out = launch(
        lambda out_type: build(out_type=out_type), ("dense_matmul", case, x.dtype.name),
        operands, refs, out_type, batched=batched if case.many_tokens else [], interpret=interpret,
    )[0]  # fmt: skip
    return out[:num_rows]
