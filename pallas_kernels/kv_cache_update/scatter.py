"""The cache write in plain XLA, in place: for CPUs, and for devices without a kernel of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def scatter_update(kv_cache: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """Write ``k`` and ``v`` into the cache, which XLA updates in place when it is donated.

    Args:
        kv_cache: [2, num_blocks, K, block_size, D].
        k, v: [T, K, D].
        slot_mapping: [T] int32 flat slots; out of range drops the write.
    """
    num_blocks, block_size = kv_cache.shape[1], kv_cache.shape[3]
    if k.shape[0] == 1:
        # XLA turns a scatter of one update into a dynamic-update-slice, which it then computes once per reader:
        # the whole cache is copied. A second, dropped update keeps it a scatter.
        k, v = (jnp.pad(x, ((0, 1), (0, 0), (0, 0))) for x in (k, v))
        slot_mapping = jnp.pad(slot_mapping, (0, 1), constant_values=num_blocks * block_size)
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    new = jnp.stack([k, v], axis=1).astype(kv_cache.dtype)  # [T, 2, K, D]
    return kv_cache.at[:, blocks, :, offsets].set(new, mode="drop")
