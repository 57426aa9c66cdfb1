"""The random number behind a sampled token: a function of the request's seed and the token's position alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def row_random_bits(seed_lo: jax.Array, seed_hi: jax.Array, positions: jax.Array) -> jax.Array:
    """One uniform uint32 per row, by Threefry-2x32 with the seed as its key and the position folded in.

    Args:
        seed_lo, seed_hi: uint32[R].
        positions: int32[R].

    Returns:
        uint32[R]; a row's number depends on nothing but its own three inputs.
    """

    def draw(key_data: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(key_data, impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, position), dtype=jnp.uint32)

    return jax.vmap(draw)(jnp.stack([seed_hi, seed_lo], axis=-1), positions)
