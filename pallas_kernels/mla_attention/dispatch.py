"""Choosing the backend of latent attention. Today there is one, in plain XLA, for all devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import jax

from pallas_kernels.mla_attention.blocked import blocked_latent_attention, scatter_latents
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata

TPU_LANES = 128
"""TPUs lay out the last dimension of an array in multiples of this, whether we do or not."""


class LatentBackend(Protocol):
    """Attention over a paged cache of latents on one kind of device. Stateless: a static part of the model.

    A latent is the key of all query heads, and its first elements are the value; every tensor-parallel device holds it
    whole. The layout of a layer's cache is the backend's own.
    """

    @property
    def name(self) -> str:
        """For logs and for the keys of stored programs."""
        ...

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Shape of one layer's cache array, of three dimensions at least; ``num_kv_heads`` is 1."""
        ...

    def block_axis(self) -> int:
        """The axis of the cache that holds blocks."""
        ...

    def update_and_attend(
        self,
        q: jax.Array,
        latents: jax.Array,
        kv_cache: jax.Array,
        metadata: AttentionMetadata,
        *,
        scale: float,
        value_size: int,
    ) -> tuple[jax.Array, jax.Array]:
        """Write the new latents, then attend.

        Args:
            q: [T, H, C], rotated already.
            latents: [T, C], rotated already.
            kv_cache: the layer's cache, in the backend's layout; donated through the step.
            metadata: the step's batch, rows ordered decode first.
            scale: multiplies q . k.
            value_size: so many of a latent's first elements are its value.

        Returns:
            ([T, H, value_size] in q's type, the updated cache). Padding tokens write nothing; their output is finite.
        """
        ...


@dataclass(frozen=True)
class BlockedLatentBackend:
    """Plain XLA, blocked over the live context. Its caches are [num_blocks, block_size, S].

    Args:
        lanes: S is the size of a latent, rounded up to a multiple of this.
        as_integers: as ``blocked_latent_attention`` takes it.
    """

    lanes: int = 1
    as_integers: bool = True

    @property
    def name(self) -> str:
        return "blocked_latent"

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        assert num_kv_heads == 1, "all heads share one latent"
        return (num_blocks, block_size, math.ceil(head_size / self.lanes) * self.lanes)

    def block_axis(self) -> int:
        return 0

    def update_and_attend(
        self,
        q: jax.Array,
        latents: jax.Array,
        kv_cache: jax.Array,
        metadata: AttentionMetadata,
        *,
        scale: float,
        value_size: int,
    ) -> tuple[jax.Array, jax.Array]:
        kv_cache = scatter_latents(kv_cache, latents, metadata.slot_mapping, as_integers=self.as_integers)
        out = blocked_latent_attention(
            q, kv_cache, metadata, scale=scale, value_size=value_size, as_integers=self.as_integers
        )
        return out, kv_cache


def latent_backend(platform: str) -> tuple[LatentBackend, str | None]:
    """The backend for ``cpu``, ``gpu`` or ``tpu``, and why it is not the device's own kernels (None: it is)."""
    if platform == "cpu":
        return BlockedLatentBackend(), None
    backend = BlockedLatentBackend(TPU_LANES if platform == "tpu" else 1, as_integers=False)
    return backend, f"there is no {platform.upper()} kernel for latent attention (MLA) yet"
