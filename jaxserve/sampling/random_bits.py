"""The random numbers behind a sampled token: functions of the request's seed and the token's position."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def threefry2x32(
    key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al., Parallel random numbers: as easy as 1, 2, 3; SC 2011).

    ``jax.random`` has the same function, but takes many keys at once only through loops of small kernels.

    Args:
        key, counter: two uint32 arrays each, all of one shape.
    """
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            x = x + y
            y = ((y << rotation) | (y >> (32 - rotation))) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def row_random_bits(
    seed_lo: jax.Array, seed_hi: jax.Array, positions: jax.Array, draw_round: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Two uniform words a row: Threefry with the seed as key and (round, position) as counter.

    Args:
        seed_lo, seed_hi: uint32[R].
        positions: int32[R].
        draw_round: int or int32[]: 0, 1, 2, … where one token takes several draws.

    Returns:
        uint32[R] twice; a row's words depend on nothing but its own inputs.
    """
    round_word = jnp.broadcast_to(jnp.asarray(draw_round).astype(jnp.uint32), seed_lo.shape)
    return threefry2x32((seed_hi, seed_lo), (round_word, positions.astype(jnp.uint32)))
