"""Choosing the attention backend: one contract, one implementation per kind of device."""

from __future__ import annotations

from typing import Protocol

import jax

from pallas_kernels.kv_cache_update.scatter import scatter_update
from pallas_kernels.ragged_paged_attention.blocked import blocked_attention
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.options import AttentionOptions


class AttentionBackend(Protocol):
    """Attention over the paged cache on one kind of device. Stateless: it is a static part of the model.

    The layout of a layer's cache is the backend's own; everybody else passes it along.
    """

    name: str

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Shape of one layer's cache array."""
        ...

    def kv_head_axis(self) -> int:
        """The axis of the cache that holds KV heads, which tensor parallelism splits."""
        ...

    def update_and_attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv_cache: jax.Array,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Write the new keys and values, then attend.

        Args:
            q: [T, H, D]; k, v: [T, K, D], rotated already.
            kv_cache: the layer's cache, in the backend's layout; donated through the step.
            metadata: the step's batch, rows ordered decode first.
            options: scale, window, soft cap.
            sinks: [H] extra logits of the softmax's denominator.

        Returns:
            ([T, H, D] in q's type, the updated cache). Padding tokens write nothing; their output is finite.
        """
        ...


class BlockedBackend:
    """Plain XLA, blocked over the live context: CPUs, and devices without a kernel of their own."""

    name = "blocked"

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, num_kv_heads, block_size, head_size)

    def kv_head_axis(self) -> int:
        return 2

    def update_and_attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv_cache: jax.Array,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        kv_cache = scatter_update(kv_cache, k, v, metadata.slot_mapping)
        return blocked_attention(q, kv_cache, metadata, options, sinks), kv_cache


def attention_backend(platform: str) -> AttentionBackend:
    """The backend for ``cpu``, ``gpu`` or ``tpu``.

    Raises:
        ValueError: a TPU that the kernels have no tile sizes for.
    """
    if platform == "tpu":
        # Pallas' TPU half takes a while to import, and no other platform needs it.
        from pallas_kernels.ragged_paged_attention.tpu import tpu_backend

        return tpu_backend(jax.local_devices()[0])
    return BlockedBackend()


__all__ = ["AttentionBackend", "AttentionMetadata", "AttentionOptions", "BlockedBackend", "attention_backend"]
