"""Products with weights: the compute type in, float32 accumulation, the compute type out."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def contract(x: jax.Array, weight: jax.Array, equation: str) -> jax.Array:
    """An einsum of activations with one weight, accumulated and returned in float32.

    float32 operands are multiplied as float32 on every device; accelerators would round them otherwise.
    """
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else None
    return jnp.einsum(equation, x, weight, precision=precision, preferred_element_type=jnp.float32)


def linear(x: jax.Array, weight: jax.Array, equation: str, bias: jax.Array | None = None) -> jax.Array:
    """``contract`` plus a bias, rounded to x's type once."""
    y = contract(x, weight, equation)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(x.dtype)
