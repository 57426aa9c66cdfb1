"""What an all-reduce must return: partial results added in the order of the devices, in float32, rounded once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def ordered_sum(partial: jax.Array, axis: str) -> jax.Array:
    """The sum over ``axis`` of what each device holds, the same bits on all of them and for any number of rows.

    Args:
        partial: [T, M] of each device, in a floating-point type.
        axis: of the mesh, inside a ``shard_map``.
    """
    parts = lax.all_gather(partial, axis)
    total = parts[0].astype(jnp.float32)
    for part in parts[1:]:
        total = total + part.astype(jnp.float32)
    return total.astype(partial.dtype)
