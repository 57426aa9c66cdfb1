"""The float32 oracle of latent attention: plain, right and slow. It never serves users."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata


def latent_update(kv_cache: jax.Array, latents: jax.Array, slot_mapping: jax.Array) -> jax.Array:
    """Write each new token's latent to its slot.

    Args:
        kv_cache: [num_blocks, block_size, C].
        latents: [T, C].
        slot_mapping: [T] int32 flat slots; out of range drops the write.
    """
    flat = kv_cache.reshape(-1, kv_cache.shape[2])
    return flat.at[slot_mapping].set(latents.astype(flat.dtype), mode="drop").reshape(kv_cache.shape)


def latent_attention(
    q: jax.Array, kv_cache: jax.Array, metadata: AttentionMetadata, *, scale: float, value_size: int
) -> jax.Array:
    """Causal attention of each row's new tokens over its cached latents (which include the new ones already).

    Args:
        q: [T, H, C] queries, any float type.
        kv_cache: [num_blocks, block_size, C]: a key of all heads, whose first ``value_size`` elements are the value.
        metadata: the batch.
        scale: multiplies q . k.
        value_size: elements of a value.

    Returns:
        [T, H, value_size] in q's type; zero for padding tokens.
    """
    num_tokens, _, size = q.shape
    tables = metadata.block_tables[metadata.row_ids]  # [T, B]
    k = kv_cache[tables].astype(jnp.float32).reshape(num_tokens, -1, size)
    visible = jnp.arange(k.shape[1])[None] <= metadata.positions[:, None]
    scores = jnp.einsum("thc,tsc->ths", q.astype(jnp.float32), k, precision="highest") * scale
    weights = jax.nn.softmax(jnp.where(visible[:, None], scores, -jnp.inf), axis=-1)
    v = jnp.where(visible[:, :, None], k[:, :, :value_size], 0.0)  # slots never written may hold NaN
    out = jnp.einsum("ths,tsc->thc", weights, v, precision="highest")
    live = jnp.arange(num_tokens) < metadata.query_start_loc[-1]
    return jnp.where(live[:, None, None], out, 0.0).astype(q.dtype)
