"""Choosing the grouped matmul of a device: one contract, whatever computes it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul import blocked

_OUTPUTS_FIRST = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)


def grouped_matmul(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """Rows of ``lhs``, sorted by group, each by the matrix of its group. What computes it is chosen when it is
    lowered, for the target's platform.

    Args:
        lhs: [N, K], padding rows last.
        rhs: [E, M, K], outputs first, as weights are.
        group_sizes: int32 [E] rows of each group; they may add up to less than N.

    Returns:
        [N, M] in lhs's type, accumulated in float32. Padding rows are zero.
    """
    return lax.platform_dependent(lhs, rhs, group_sizes, cpu=blocked.grouped_matmul, default=_ragged_dot)


def _ragged_dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    """XLA's own. What it leaves in rows of no group is up to the backend, hence the mask."""
    precision = lax.Precision.HIGHEST if rhs.dtype == jnp.float32 else None
    out = lax.ragged_dot_general(
        lhs, rhs, group_sizes, _OUTPUTS_FIRST, precision=precision, preferred_element_type=lhs.dtype
    )
    live = jnp.arange(lhs.shape[0]) < jnp.sum(group_sizes)
    return jnp.where(live[:, None], out, 0)
