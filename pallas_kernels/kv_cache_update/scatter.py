"""The cache write in plain XLA, in place: for CPUs, and for devices without a kernel of their own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kv_cache_update.quantized import (
    KVCache,
    ScaledCache,
    as_bits,
    from_bits,
    quantize_tokens,
    scatter_scales,
    to_cache_type,
)


def scatter_update(kv_cache: KVCache, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> KVCache:
    """Write ``k`` and ``v`` into the cache, which XLA updates in place when it is donated.

    Args:
        kv_cache: [2, num_blocks, K, block_size, D], any type; int8 with its scales.
        k, v: [T, K, D].
        slot_mapping: [T] int32 flat slots; out of range drops the write.
    """
    if isinstance(kv_cache, ScaledCache):
        (k, k_scales), (v, v_scales) = quantize_tokens(k), quantize_tokens(v)
        scales = scatter_scales(kv_cache.scales, jnp.stack([k_scales, v_scales], axis=1), slot_mapping)
        return ScaledCache(_scatter(kv_cache.values, k, v, slot_mapping), scales)
    k, v = (to_cache_type(x, kv_cache.dtype) for x in (k, v))
    cache, k, v = (as_bits(x) for x in (kv_cache, k, v))
    return from_bits(_scatter(cache, k, v, slot_mapping), kv_cache.dtype)


def _scatter(kv_cache: jax.Array, k: jax.Array, v: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    num_blocks, block_size = kv_cache.shape[1], kv_cache.shape[3]
    if k.shape[0] == 1:
        # XLA turns a scatter of one update into a dynamic-update-slice, which it then computes once per reader:
        # the whole cache is copied. A second, dropped update keeps it a scatter.
        k, v = (jnp.pad(x, ((0, 1), (0, 0), (0, 0))) for x in (k, v))
        slot_mapping = jnp.pad(slot_mapping, (0, 1), constant_values=num_blocks * block_size)
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    new = jnp.stack([k, v], axis=1)  # [T, 2, K, D]
    return kv_cache.at[:, blocks, :, offsets].set(new, mode="drop")
