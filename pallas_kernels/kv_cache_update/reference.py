"""The oracle of the cache write: scatter each new token's keys and values to its slot."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kv_cache_update.quantized import (
    KVCache,
    ScaledCache,
    quantize_tokens,
    scatter_scales,
    to_cache_type,
)


def kv_cache_update(kv_cache: KVCache, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> KVCache:
    """Write ``k`` and ``v`` into the cache.

    Args:
        kv_cache: [2, num_blocks, K, block_size, D], any type; int8 with its scales.
        k, v: [T, K, D].
        slot_mapping: [T] int32 flat slots; out of range drops the write.

    Returns:
        The updated cache.
    """
    if isinstance(kv_cache, ScaledCache):
        (k, k_scales), (v, v_scales) = quantize_tokens(k), quantize_tokens(v)
        scales = scatter_scales(kv_cache.scales, jnp.stack([k_scales, v_scales], axis=1), slot_mapping)
        return ScaledCache(_scatter(kv_cache.values, k, v, slot_mapping), scales)
    return _scatter(kv_cache, k, v, slot_mapping)


def _scatter(kv_cache: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    block_size = kv_cache.shape[3]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    new = to_cache_type(jnp.stack([k, v]), kv_cache.dtype)  # [2, T, K, D]
    return kv_cache.at[:, blocks, :, offsets].set(jnp.moveaxis(new, 0, 1), mode="drop")
