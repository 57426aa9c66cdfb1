"""The float32 oracle of ragged paged attention: plain, right and slow. It never serves users."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kv_cache_update.quantized import KVCache, ScaledCache, dequantized
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata


def ragged_paged_attention(
    q: jax.Array,
    kv_cache: KVCache,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
) -> jax.Array:
    """Causal attention of each row's new tokens over its cached ones (which include the new ones already).

    Args:
        q: [T, H, D] queries, any float type.
        kv_cache: [2, num_blocks, K, block_size, D], keys then values, the oracle's layout; int8 with its
            scales.
        metadata: the batch.
        scale: multiplies q . k.
        sliding_window: a query sees this many tokens, itself included.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``.
        sinks: [H] extra logit of the softmax's denominator.
        k_scale, v_scale: what a quantized cache's keys and values are multiplied by, [] or [K].

    Returns:
        [T, H, D] in q's type; zero for padding tokens.
    """
    if isinstance(kv_cache, ScaledCache):
        kv_cache = dequantized(kv_cache)
    num_tokens, num_heads, head_size = q.shape
    _, _, num_kv_heads, block_size, _ = kv_cache.shape
    group = num_heads // num_kv_heads
    tables = metadata.block_tables[metadata.row_ids]  # [T, B]
    k = kv_cache[0][tables].astype(jnp.float32)  # [T, B, K, block_size, D]
    v = kv_cache[1][tables].astype(jnp.float32)
    k = jnp.moveaxis(k, 2, 1).reshape(num_tokens, num_kv_heads, -1, head_size)
    v = jnp.moveaxis(v, 2, 1).reshape(num_tokens, num_kv_heads, -1, head_size)
    k, v = (x if s is None else x * jnp.reshape(s, (-1, 1, 1)) for x, s in ((k, k_scale), (v, v_scale)))
    key_positions = jnp.arange(tables.shape[1] * block_size)
    visible = key_positions[None] <= metadata.positions[:, None]
    if sliding_window is not None:
        visible &= key_positions[None] > metadata.positions[:, None] - sliding_window
    qg = q.astype(jnp.float32).reshape(num_tokens, num_kv_heads, group, head_size)
    scores = jnp.einsum("tkgd,tksd->tkgs", qg, k, precision="highest") * scale
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(visible[:, None, None], scores, -jnp.inf)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, num_kv_heads, group, 1)
        top = jnp.maximum(top, sink)
    weights = jnp.exp(scores - top)
    denominator = weights.sum(-1, keepdims=True)
    if sinks is not None:
        denominator = denominator + jnp.exp(sink - top)
    v = jnp.where(visible[:, None, :, None], v, 0.0)  # slots never written may hold NaN
    out = jnp.einsum("tkgs,tksd->tkgd", weights / denominator, v, precision="highest")
    live = jnp.arange(num_tokens) < metadata.query_start_loc[-1]
    return jnp.where(live[:, None, None], out.reshape(q.shape), 0.0).astype(q.dtype)
