"""Products with weights: the compute type in, float32 accumulation, the compute type out."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def contract(x: jax.Array, weight: jax.Array, equation: str) -> jax.Array:
    """An einsum of activations with one weight, accumulated and returned in float32."""
    return _einsum(x, weight, equation, jnp.float32)


def linear(x: jax.Array, weight: jax.Array, equation: str, bias: jax.Array | None = None) -> jax.Array:
    """An einsum of activations with one weight, plus a bias, rounded to x's type once.

    Without a bias the product itself returns x's type: the devices accumulate in float32 all the same, and
    a float32 result that is rounded afterwards costs an H200 8 % of a step (it is written out), and tensor
    parallelism twice the traffic.
    """
    if bias is None:
        return _einsum(x, weight, equation, x.dtype)
    return (contract(x, weight, equation) + bias.astype(jnp.float32)).astype(x.dtype)


def _einsum(x: jax.Array, weight: jax.Array, equation: str, result: DTypeLike) -> jax.Array:
    """float32 operands are multiplied as float32 on every device; accelerators would round them otherwise."""
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, weight, precision=precision, preferred_element_type=result)
