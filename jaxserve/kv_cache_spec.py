"""KVCacheSpec: what one layer keeps per token, and how layers that keep the same form a group with one block table."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class KVCacheSpec:
    """Keys and values of one attention layer, or the latent that both are made from.

    Args:
        num_kv_heads: heads stored (after replication for tensor parallelism); one for a latent.
        head_size: elements per head.
        dtype: name of the element type, such as ``bfloat16``.
        dtype_bytes: bytes per element.
        sliding_window: tokens a query sees, itself included; None sees all. Blocks that no later query can see
            are freed.
        latent_rank: None where keys and values are cached. Else one latent a token is (multi-head latent attention),
            which is the key, and whose first so many elements are the value.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    dtype_bytes: int
    sliding_window: int | None = None
    latent_rank: int | None = None

    @property
    def is_latent(self) -> bool:
        """Whether a latent is cached, which every tensor-parallel device holds whole."""
        return self.latent_rank is not None

    @property
    def value_size(self) -> int:
        """Elements of a value that attention adds up."""
        return self.head_size if self.latent_rank is None else self.latent_rank

    def on_one_of(self, tensor_parallel_size: int) -> KVCacheSpec:
        """What each tensor-parallel device caches: its share of the heads, or the whole latent."""
        if self.is_latent:
            return self
        return replace(self, num_kv_heads=self.num_kv_heads // tensor_parallel_size)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block of ``block_size`` tokens in this layer, keys and values together."""
        scale_bytes = 4 if self.dtype == "int8" else 0  # a float32 a token and head
        copies = 1 if self.is_latent else 2
        return copies * block_size * self.num_kv_heads * (self.head_size * self.dtype_bytes + scale_bytes)


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share one block table: the same spec, hence the same blocks."""

    layer_indices: tuple[int, ...]
    spec: KVCacheSpec
