"""Latent attention in plain XLA: the walk over the live context of ``ragged_paged_attention.blocked``, over latents.

To the walk a latent is one KV head of all query heads, and its value a part of its key: it is gathered once.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from pallas_kernels.kv_cache_update.quantized import as_bits, from_bits
from pallas_kernels.ragged_paged_attention.blocked import Walk, walk_context
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.options import AttentionOptions


class _Latents(Walk):
    """Latents [num_blocks, block_size, S] of C elements, padded to S; moved as integers or as they are."""

    def __init__(
        self, q: jax.Array, kv_cache: jax.Array, scale: float, value_size: int, as_integers: bool
    ) -> None:
        _, num_heads, self.size = q.shape
        super().__init__(AttentionOptions(scale), num_heads, 1, kv_cache.shape[1], value_size, kv_cache.dtype)
        self.blocks = as_bits(kv_cache) if as_integers else kv_cache

    def gather(self, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        """[..., B] physical blocks -> [..., 1, B * block_size, C] and its first ``value_size`` elements."""
        bits = self.blocks.at[blocks].get(mode="promise_in_bounds")
        # Unasked, XLA:TPU turns the whole cache around, in every layer, for the sake of a product.
        bits = with_layout_constraint(bits, Layout(major_to_minor=tuple(range(bits.ndim))))
        rows = from_bits(bits, self.dtype)
        rows = rows.reshape(*blocks.shape[:-1], 1, self.tile, rows.shape[-1]).astype(jnp.float32)
        return rows[..., : self.size], rows[..., : self.value_size]


def blocked_latent_attention(
    q: jax.Array,
    kv_cache: jax.Array,
    metadata: AttentionMetadata,
    *,
    scale: float,
    value_size: int,
    as_integers: bool = True,
) -> jax.Array:
    """Attend each row's new tokens to its cached latents (the new ones are in the cache already).

    Args:
        q: [T, H, C].
        kv_cache: [num_blocks, block_size, S], S >= C.
        metadata: the step's batch, rows ordered decode first.
        scale: multiplies q . k.
        value_size: so many of a latent's first elements are its value.
        as_integers: move small floats as integers, which CPUs need (``as_bits``), and for which TPUs copy the cache.

    Returns:
        [T, H, value_size] in q's type; zero for padding tokens.
    """
    return walk_context(q, metadata, _Latents(q, kv_cache, scale, value_size, as_integers))


def scatter_latents(
    kv_cache: jax.Array, latents: jax.Array, slot_mapping: jax.Array, *, as_integers: bool = True
) -> jax.Array:
    """Write new latents into the cache, which XLA updates in place when it is donated.

    Args:
        kv_cache: [num_blocks, block_size, S].
        latents: [T, C], C <= S; what is left is zero.
        slot_mapping: [T] int32 flat slots; out of range drops the write.
        as_integers: as ``blocked_latent_attention`` takes it.
    """
    num_blocks, block_size, stored = kv_cache.shape
    new = latents.astype(kv_cache.dtype)
    # A single update becomes a dynamic-update-slice, which would copy the cache: see ``scatter_update``.
    more = int(new.shape[0] == 1)
    new = jnp.pad(new, ((0, more), (0, stored - new.shape[1])))
    slots = jnp.pad(slot_mapping, (0, more), constant_values=num_blocks * block_size)
    cache, new = (as_bits(x) if as_integers else x for x in (kv_cache, new))
    cache = cache.at[slots // block_size, slots % block_size].set(new, mode="drop")
    return from_bits(cache, kv_cache.dtype)
