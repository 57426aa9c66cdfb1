"""The oracle: every row by every matrix in float32, and its own group's result kept."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def grouped_matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """[N, M] float32: row n of ``lhs`` by the matrix of its group.

    Args:
        lhs: [N, K], rows in the order of their groups, padding last.
        rhs: [E, M, K], outputs first.
        group_sizes: int32 [E] rows of each group; what is left of N is padding, whose result is zero.
    """
    ends = jnp.cumsum(group_sizes)
    rows = jnp.arange(lhs.shape[0])[:, None]
    in_group = (rows >= ends - group_sizes) & (rows < ends)
    everything = jnp.einsum(
        "nk,emk->nem", lhs.astype(jnp.float32), rhs.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
    )
    return jnp.sum(jnp.where(in_group[:, :, None], everything, 0.0), axis=1)
