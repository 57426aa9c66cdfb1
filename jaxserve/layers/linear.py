"""Products with weights: the compute type in, float32 accumulation, the compute type out.

Weights are [N, M], outputs first, as checkpoints hold them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.layers.params import LayerContext, StreamNorm
from pallas_kernels.dense_matmul.dispatch import DenseMatmul

WEIGHT_FIRST_TOKENS = 64
"""Up to so many tokens a CPU multiplies faster with the weight on the left: 12 to 30 % of such a product."""


def contract(
    x: jax.Array, weight: jax.Array, *, weight_first: bool = False, kernel: DenseMatmul | None = None
) -> jax.Array:
    """[T, M] by [N, M] to [T, N], accumulated and returned in float32.

    Args:
        x: [T, M].
        weight: [N, M].
        weight_first: compute it as (weight x^T)^T where the tokens are few (``LayerContext.weight_first``).
        kernel: what computes it where it can (``LayerContext.dense_matmul``).
    """
    return _product(x, weight, jnp.float32, weight_first, kernel)


def linear(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, *, weight_first: bool = False,
    kernel: DenseMatmul | None = None, joins: bool = False,
) -> jax.Array:  # fmt: skip
    """``contract`` plus a bias [N], rounded to x's type once. ``joins`` says that a residual is added to the result and
    nothing else done with it.

    Without a bias the product itself returns x's type: the devices accumulate in float32 all the same, and
    a float32 result that is rounded afterwards costs an H200 8 % of a step (it is written out), and tensor
    parallelism twice the traffic.
    """
    if bias is None:
        return _product(x, weight, x.dtype, weight_first, kernel, joins)
    y = _product(x, weight, jnp.float32, weight_first, kernel)
    return (y + bias.astype(jnp.float32)).astype(x.dtype)


def gated_linear(x: jax.Array, weight: jax.Array, context: LayerContext) -> jax.Array | None:
    """silu(gate) * up, [T, F], of a weight [2 F, M], gate's rows first; None where no kernel does all of that."""
    kernel = context.dense_matmul
    if kernel is None or not _computes(kernel, x, weight, gated=True):
        return None
    return kernel(x, weight, gated=True)


def onto_stream(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, context: LayerContext, stream: StreamNorm
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """``split_linear`` added to the residual stream, and the norm of that: [T, M], for the next product."""
    kernel = context.dense_matmul
    if bias is None and (
        context.tensor_parallel_size > 1 or kernel is None or not _computes(kernel, x, weight, residual=True)
    ):
        y = linear(x, weight, weight_first=context.weight_first, kernel=kernel, joins=True)
        return context.add_and_norm(y, stream)
    hidden = split_linear(x, weight, bias, context, stream.hidden)
    return hidden, context.normal(hidden, stream.vector, stream.eps, x.shape[0])


def split_linear(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None, context: LayerContext,
    residual: jax.Array | None = None,
) -> jax.Array:  # fmt: skip
    """``linear`` where each tensor-parallel device holds a part of M: their partial results are added up.

    Args:
        x: [T, M / devices].
        weight: [N, M / devices].
        bias: [N], whole.
        context: says how they exchange them (``LayerContext.reduce_tokens``).
        residual: added to all of that, of the result's shape.
    """
    kernel = context.dense_matmul
    if context.tensor_parallel_size == 1:
        fused = bias is None and residual is not None and kernel is not None
        if fused and _computes(kernel, x, weight, residual=True):
            return kernel(x, weight, residual=residual)
        joins = residual is not None
        y = linear(x, weight, bias, weight_first=context.weight_first, kernel=kernel, joins=joins)
        return y if residual is None else residual + y
    y = linear(x, weight, weight_first=context.weight_first, kernel=kernel)
    if bias is None:
        return context.reduce_tokens(y, residual)
    y = (context.reduce_tokens(y).astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)
    return y if residual is None else residual + y


def _computes(
    kernel: DenseMatmul, x: jax.Array, weight: jax.Array, *, gated: bool = False, residual: bool = False,
    num_rows: int | None = None,
) -> bool:  # fmt: skip
    """Whether the kernel does, these rows or so many."""
    outputs, inner = weight.shape
    num_rows = num_rows or x.shape[0]
    why_not = kernel.why_not(num_rows, outputs, inner, weight.dtype, gated=gated, residual=residual)
    return x.dtype == weight.dtype and why_not is None


def _product(
    x: jax.Array, weight: jax.Array, result: DTypeLike, weight_first: bool, kernel: DenseMatmul | None,
    joins: bool = False,
) -> jax.Array:  # fmt: skip
    """float32 operands are multiplied as float32 on every device; accelerators would round them otherwise.

    Of a batch-invariant engine, what a residual joins is rounded once, with it: by the kernel that adds it too, or by
    XLA, which has cuBLAS do so. A kernel's product alone is rounded before; so are those of weights that it does not
    take.
    """
    invariant = kernel is not None and kernel.invariant
    joins = joins and invariant and _computes(kernel, x, weight, residual=True, num_rows=1)
    if kernel is not None and not joins and _computes(kernel, x, weight):
        return kernel(x, weight, out_dtype=jnp.dtype(result))
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    if weight_first and 1 < x.shape[0] <= WEIGHT_FIRST_TOKENS:
        y = jnp.einsum("nm,tm->nt", weight, x, precision=precision, preferred_element_type=result)
        return jax.lax.optimization_barrier(y).T  # else XLA swaps the operands back
    y = jnp.einsum("tm,nm->tn", x, weight, precision=precision, preferred_element_type=result)
    if invariant and not joins:
        # Else what follows, a bias say, may become a part of the product, or not, as the number of rows has it.
        return jax.lax.optimization_barrier(y)
    return y
