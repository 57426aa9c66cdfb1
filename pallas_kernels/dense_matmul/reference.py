"""The oracle: the product in float32, and what may follow it, rounded where the kernel rounds."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def dense_matmul(
    x: jax.Array, weight: jax.Array, *, residual: jax.Array | None = None, gated: bool = False
) -> jax.Array:
    """[T, N] float32, or [T, N / 2] with ``gated``.

    Args:
        x: [T, K].
        weight: [N, K], outputs first.
        residual: [T, N] added to the product before that is rounded.
        gated: the weight is a gate's N / 2 rows and then as many others: silu(gate) * other, both rounded before.
    """
    y = jnp.einsum(
        "tk,nk->tn", x.astype(jnp.float32), weight.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    if gated:
        gate, up = jnp.split(y.astype(x.dtype).astype(jnp.float32), 2, axis=1)
        y = jax.nn.silu(gate) * up
    if residual is not None:
        y = residual.astype(jnp.float32) + y
    return y
