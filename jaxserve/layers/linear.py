"""Products with weights: the compute type in, float32 accumulation, the compute type out.

Weights are [N, M], outputs first, as checkpoints hold them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.layers.params import LayerContext

WEIGHT_FIRST_TOKENS = 64
"""Up to so many tokens a CPU multiplies faster with the weight on the left: 12 to 30 % of such a product."""


def contract(x: jax.Array, weight: jax.Array, *, weight_first: bool = False) -> jax.Array:
    """[T, M] by [N, M] to [T, N], accumulated and returned in float32.

    Args:
        x: [T, M].
        weight: [N, M].
        weight_first: compute it as (weight x^T)^T where the tokens are few (``LayerContext.weight_first``).
    """
    return _product(x, weight, jnp.float32, weight_first)


def linear(
    x: jax.Array, weight: jax.Array, bias: jax.Array | None = None, *, weight_first: bool = False
) -> jax.Array:
    """``contract`` plus a bias [N], rounded to x's type once.

    Without a bias the product itself returns x's type: the devices accumulate in float32 all the same, and
    a float32 result that is rounded afterwards costs an H200 8 % of a step (it is written out), and tensor
    parallelism twice the traffic.
    """
    if bias is None:
        return _product(x, weight, x.dtype, weight_first)
    return (_product(x, weight, jnp.float32, weight_first) + bias.astype(jnp.float32)).astype(x.dtype)


def split_linear(x: jax.Array, weight: jax.Array, bias: jax.Array | None, context: LayerContext) -> jax.Array:
    """``linear`` where each tensor-parallel device holds a part of M: their partial results are added up.

    Args:
        x: [T, M / devices].
        weight: [N, M / devices].
        bias: [N], whole.
        context: says how they exchange them (``LayerContext.reduce_tokens``).
    """
    if context.tensor_parallel_size == 1:
        return linear(x, weight, bias, weight_first=context.weight_first)
    y = context.reduce_tokens(linear(x, weight, weight_first=context.weight_first))
    return y if bias is None else (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def _product(x: jax.Array, weight: jax.Array, result: DTypeLike, weight_first: bool) -> jax.Array:
    """float32 operands are multiplied as float32 on every device; accelerators would round them otherwise."""
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    if weight_first and 1 < x.shape[0] <= WEIGHT_FIRST_TOKENS:
        y = jnp.einsum("nm,tm->nt", weight, x, precision=precision, preferred_element_type=result)
        return jax.lax.optimization_barrier(y).T  # else XLA swaps the operands back
    return jnp.einsum("tm,nm->tn", x, weight, precision=precision, preferred_element_type=result)
