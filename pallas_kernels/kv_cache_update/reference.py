"""The oracle of the cache write: scatter each new token's keys and values to its slot."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def kv_cache_update(kv_cache: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """Write ``k`` and ``v`` into the cache.

    Args:
        kv_cache: [2, num_blocks, K, block_size, D].
        k, v: [T, K, D].
        slot_mapping: [T] int32 flat slots; out of range drops the write.

    Returns:
        The updated cache.
    """
    block_size = kv_cache.shape[3]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    new = jnp.stack([k, v]).astype(kv_cache.dtype)  # [2, T, K, D]
    return kv_cache.at[:, blocks, :, offsets].set(jnp.moveaxis(new, 0, 1), mode="drop")
