"""KVCacheSpec: what one layer keeps per token, and how layers that keep the same form a group with one block table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KVCacheSpec:
    """Keys and values of one attention layer.

    Args:
        num_kv_heads: heads stored (after replication for tensor parallelism).
        head_size: elements per head.
        dtype: name of the element type, such as ``bfloat16``.
        dtype_bytes: bytes per element.
        sliding_window: tokens a query sees, itself included; None sees all. Blocks that no later query can see
            are freed.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    dtype_bytes: int
    sliding_window: int | None = None

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block of ``block_size`` tokens in this layer, keys and values together."""
        scale_bytes = 4 if self.dtype == "int8" else 0  # a float32 a token and head
        return 2 * block_size * self.num_kv_heads * (self.head_size * self.dtype_bytes + scale_bytes)


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share one block table: the same spec, hence the same blocks."""

    layer_indices: tuple[int, ...]
    spec: KVCacheSpec


def group_layers(specs: list[KVCacheSpec]) -> list[KVCacheGroup]:
    """Group layers by equal spec, in the order of first appearance."""
    by_spec: dict[KVCacheSpec, list[int]] = {}
    for index, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(index)
    return [KVCacheGroup(tuple(indices), spec) for spec, indices in by_spec.items()]
