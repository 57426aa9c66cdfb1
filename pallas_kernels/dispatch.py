"""Choosing the attention backend: one contract, one implementation per kind of device."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from pallas_kernels.kv_cache_update.quantized import KVCache
from pallas_kernels.kv_cache_update.scatter import scatter_update
from pallas_kernels.ragged_paged_attention.blocked import blocked_attention
from pallas_kernels.ragged_paged_attention.metadata import AttentionMetadata
from pallas_kernels.ragged_paged_attention.options import AttentionOptions


class AttentionBackend(Protocol):
    """Attention over the paged cache on one kind of device. Stateless: it is a static part of the model.

    The layout of a layer's cache is the backend's own; everybody else passes it along.
    """

    name: str
    separate_paths: bool
    """Whether a token's bits depend on whether its row is among the decoding ones of the step."""

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        """Shape of one layer's cache array."""
        ...

    def block_axis(self) -> int:
        """The axis of the cache that holds blocks. KV heads are always on axis 2, as those of int8's scales."""
        ...

    def prepare(
        self,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        *,
        num_tokens: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        kv_cache: KVCache | None = None,
    ) -> Any:
        """What a step's layers with these options share, worked out once: ``update_and_attend``'s ``plan``.

        ``kv_cache`` is the cache of one of them, for its shape and type.
        """
        ...

    def update_and_attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: jax.Array | None = None,
        plan: Any = None,
    ) -> tuple[jax.Array, KVCache]:
        """Write the new keys and values, then attend.

        Args:
            q: [T, H, D]; k, v: [T, K, D], rotated already.
            kv_cache: the layer's cache, in the backend's layout, int8 with its scales; donated through the step.
            metadata: the step's batch, rows ordered decode first.
            options: scale, window, soft cap.
            sinks: [H] extra logits of the softmax's denominator.
            plan: of ``prepare``, with the same options; None works it out for this layer alone.

        Returns:
            ([T, H, D] in q's type, the updated cache). Padding tokens write nothing; their output is finite.
        """
        ...


class BlockedBackend:
    """Plain XLA, blocked over the live context: CPUs, and devices without a kernel of their own.

    Args:
        fixed_order: as ``blocked_attention`` takes it.
    """

    name = "blocked"

    def __init__(self, fixed_order: bool = False) -> None:
        self.fixed_order = fixed_order
        self.separate_paths = not fixed_order

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> tuple[int, ...]:
        return (2, num_blocks, num_kv_heads, block_size, head_size)

    def block_axis(self) -> int:
        return 1

    def prepare(self, metadata: AttentionMetadata, options: AttentionOptions, **sizes: Any) -> None:
        return None

    def update_and_attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        options: AttentionOptions,
        sinks: jax.Array | None = None,
        plan: Any = None,
    ) -> tuple[jax.Array, KVCache]:
        kv_cache = scatter_update(kv_cache, k, v, metadata.slot_mapping)
        attended = blocked_attention(q, kv_cache, metadata, options, sinks, fixed_order=self.fixed_order)
        return attended, kv_cache


@dataclass(frozen=True)
class AttentionSizes:
    """What a model asks of its attention, on one device."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: Any
    kv_dtype: Any


def attention_backend(
    platform: str, sizes: AttentionSizes, layer_options: Collection[AttentionOptions]
) -> tuple[AttentionBackend, str | None]:
    """The backend for ``cpu``, ``gpu`` or ``tpu``, and why it is not the device's own kernels (None: it is).

    Raises:
        ValueError: a TPU that the kernels have no tile sizes for.
    """
    group = sizes.num_heads // sizes.num_kv_heads
    if platform == "cpu":
        return BlockedBackend(), None
    if platform == "tpu":
        # Pallas' TPU and GPU halves take a while to import, and no other platform needs them.
        from pallas_kernels.ragged_paged_attention.tpu import supported, tpu_backend

        reasons = [
            supported(sizes.head_size, group, sizes.block_size, sizes.dtype, options, sizes.kv_dtype)
            for options in layer_options
        ]
        why_not = next(filter(None, reasons), None)
        return (BlockedBackend(), why_not) if why_not else (tpu_backend(jax.local_devices()[0]), None)
    why_not = _hopper_why_not(sizes, group, layer_options)
    if why_not is not None:
        return BlockedBackend(), why_not
    from pallas_kernels.ragged_paged_attention.gpu import GpuBackend

    return GpuBackend(), None


def _hopper_why_not(
    sizes: AttentionSizes, group: int, layer_options: Collection[AttentionOptions]
) -> str | None:
    version = tuple(int(part) for part in jax.__version__.split(".")[:2])
    if version < (0, 11):
        return f"the Hopper kernels need jax >= 0.11 (Python >= 3.12), this is jax {jax.__version__}"
    from pallas_kernels.ragged_paged_attention.gpu import device_why_not, supported

    if (why_not := device_why_not(jax.local_devices()[0])) is not None:
        return why_not
    reasons = [
        supported(sizes.head_size, group, sizes.block_size, sizes.dtype, options, sizes.kv_dtype)
        for options in layer_options
    ]
    return next(filter(None, reasons), None)


__all__ = [
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionOptions",
    "AttentionSizes",
    "BlockedBackend",
    "attention_backend",
]
