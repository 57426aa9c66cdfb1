"""Caches of one byte an element: how values become float8 or int8 on their way in, and where int8's scales lie.

float8 (e4m3) covers what keys and values are, so one scale a KV head and layer is enough, and it need not be near the
cache: ``scale_in`` divides keys and values by it and multiplies queries, ``scale_out`` multiplies the result. Kernels
see a cache of another type and nothing else.

int8 has no range to spare: every token and head gets a scale of its own, the largest magnitude over 127, which lies
beside the values (``ScaledCache``), 4 bytes to every head's key and value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

FLOAT8 = jnp.dtype(jnp.float8_e4m3fn)
INT8 = jnp.dtype(jnp.int8)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ScaledCache:
    """A layer's int8 cache.

    Args:
        values: int8 in the backend's layout, KV heads on axis 2.
        scales: float32 [num_blocks, 2, K, block_size]: what keys, then values, are multiplied by.
    """

    values: Any
    scales: Any


KVCache = jax.Array | ScaledCache
"""A layer's cache: an array in the backend's layout, with its scales where it is int8."""


def abstract_cache(
    shape: tuple[int, ...], dtype: Any, num_blocks: int, block_size: int
) -> jax.ShapeDtypeStruct | ScaledCache:
    """Shapes and types of a layer's cache, whose values have the backend's ``shape``, KV heads on axis 2."""
    values = jax.ShapeDtypeStruct(shape, dtype)
    if jnp.dtype(dtype) != INT8:
        return values
    return ScaledCache(
        values, jax.ShapeDtypeStruct((num_blocks, 2, shape[2], block_size), jnp.float32)
    )  # fmt: skip


def values_of(kv_cache: KVCache) -> jax.Array:
    """The array that holds keys and values."""
    return kv_cache.values if isinstance(kv_cache, ScaledCache) else kv_cache


def as_bits(x: jax.Array) -> jax.Array:
    """Small floats as integers of their size, for moving them: XLA's CPU widens whole arrays of them before it
    scatters to or gathers from them, which would copy the cache in every layer."""
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 2:
        return x
    return jax.lax.bitcast_convert_type(x, jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint16)


def from_bits(x: jax.Array, dtype: Any) -> jax.Array:
    """The floats that ``as_bits`` hid."""
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


def to_cache_type(x: jax.Array, dtype: Any) -> jax.Array:
    """Cast for the cache; what exceeds float8's range becomes its largest value instead of NaN."""
    if jnp.dtype(dtype) == FLOAT8:
        largest = float(jnp.finfo(FLOAT8).max)
        x = jnp.clip(x, -largest, largest)
    return x.astype(dtype)


def scale_in(
    q: jax.Array, k: jax.Array, v: jax.Array, k_scale: jax.Array, v_scale: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values as attention over a scaled cache takes them.

    Args:
        q: [T, H, D]; k, v: [T, K, D].
        k_scale, v_scale: float32, [] or [K]: cached keys and values times these are the true ones.
    """
    num_kv_heads = k.shape[1]
    per_head = [jnp.broadcast_to(s, (num_kv_heads,))[:, None] for s in (k_scale, v_scale)]
    per_query = jnp.repeat(per_head[0], q.shape[1] // num_kv_heads, axis=0)
    wide = (x.astype(jnp.float32) for x in (q, k, v))
    scaled = (x * s for x, s in zip(wide, (per_query, 1 / per_head[0], 1 / per_head[1])))
    q_new, k_new, v_new = (x.astype(q.dtype) for x in scaled)
    return q_new, k_new, v_new


def scale_out(out: jax.Array, v_scale: jax.Array, num_kv_heads: int) -> jax.Array:
    """The result [T, H, D] of attention over values that ``scale_in`` divided."""
    per_head = jnp.repeat(jnp.broadcast_to(v_scale, (num_kv_heads,)), out.shape[1] // num_kv_heads)
    return (out.astype(jnp.float32) * per_head[:, None]).astype(out.dtype)


def quantize_tokens(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """[T, K, D] to int8 of the same shape, and each token's and head's scale, float32 [T, K]; zeros have scale 0."""
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / 127
    inverse = jnp.where(scale > 0, 1 / jnp.where(scale > 0, scale, 1), 0)
    return jnp.round(wide * inverse[..., None]).astype(jnp.int8), scale


def scatter_scales(scales: jax.Array, new: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """Set new tokens' scales; XLA does it in place.

    Args:
        scales: [num_blocks, 2, K, block_size].
        new: [T, 2, K].
        slot_mapping: [T] int32 flat slots; out of range drops the write.
    """
    num_blocks, block_size = scales.shape[0], scales.shape[3]
    if new.shape[0] == 1:  # see ``scatter_update``
        new = jnp.pad(new, ((0, 1), (0, 0), (0, 0)))
        slot_mapping = jnp.pad(slot_mapping, (0, 1), constant_values=num_blocks * block_size)
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    return scales.at[blocks, :, :, offsets].set(new, mode="drop")


def dequantized(kv_cache: ScaledCache) -> jax.Array:
    """The float32 cache [2, num_blocks, K, block_size, D] of an int8 one in that layout, for oracles."""
    return kv_cache.values.astype(jnp.float32) * jnp.moveaxis(kv_cache.scales, 1, 0)[..., None]
