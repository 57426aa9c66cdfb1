"""The random number behind a sampled token: a function of the request's seed and the token's position alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p


def row_random_bits(seed_lo: jax.Array, seed_hi: jax.Array, positions: jax.Array) -> jax.Array:
    """One uniform uint32 per row, by Threefry-2x32 with the seed as its key and the position as its counter.

    Args:
        seed_lo, seed_hi: uint32[R].
        positions: int32[R].

    Returns:
        uint32[R]; a row's number depends on nothing but its own three inputs.
    """

    # Per-row keys: the primitive takes them elementwise, which jax.random offers only through a loop over rows.
    first, _ = threefry2x32_p.bind(seed_hi, seed_lo, jnp.zeros_like(seed_lo), positions.astype(jnp.uint32))
    return first
