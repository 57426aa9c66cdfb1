"""Choosing what parts queries, keys and values: a device's kernel for few tokens, or XLA (None)."""

from __future__ import annotations

from typing import Any, Protocol

import jax

from pallas_kernels.hopper import hopper_why_not


class SplitHeads(Protocol):
    """Norm and rotation of heads, and their parting, in one kernel. Stateless: a static part of the model."""

    def why_not(self, num_tokens: int, head_size: int, dtype: Any) -> str | None:
        """Why so many tokens are left to XLA; None: they are not."""
        ...

    def __call__(
        self, qkv: jax.Array, cos: jax.Array, sin: jax.Array, weights: jax.Array | None, eps: float
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Normalise queries and keys (with ``weights``), rotate them, and part them from each other and the values.

        Args:
            qkv: [T, K, G + 2, D]: per KV head its G query heads, then its key, then its value.
            cos, sin: float32 [T, D / 2]; the pair of element i is i + D / 2.
            weights: [G + 1, D], of queries in the first row and of keys in the last; None normalises nothing.
            eps: of the norms.

        Returns:
            [T, K G, D], [T, K, D] and [T, K, D] in qkv's type.
        """
        ...


def split_heads_of(platform: str) -> SplitHeads | None:
    """The kernel of ``cpu``, ``gpu`` or ``tpu``; None where XLA does it."""
    if platform != "gpu" or hopper_why_not("the Hopper kernel of heads") is not None:
        return None
    from pallas_kernels.split_heads.gpu import GpuSplitHeads

    return GpuSplitHeads()
