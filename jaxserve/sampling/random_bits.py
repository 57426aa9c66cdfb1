"""The random numbers behind a sampled token: functions of the request's seed and the token's position
alone.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p


def row_random_bits(
    seed_lo: jax.Array, seed_hi: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Two uniform words a row: Threefry-2x32 with the seed as key and the position as counter.

    Args:
        seed_lo, seed_hi: uint32[R].
        positions: int32[R].

    Returns:
        uint32[R] twice; a row's words depend on nothing but its own three inputs.
    """
    # The primitive takes a key per element, which jax.random offers only through a loop over rows.
    first, second = threefry2x32_p.bind(
        seed_hi, seed_lo, jnp.zeros_like(seed_lo), positions.astype(jnp.uint32)
    )
    return first, second
