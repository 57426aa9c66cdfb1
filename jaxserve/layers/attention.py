"""Self-attention over the paged cache: fused q, k, v product, norm and rotation of q and k, backend, output product."""

from __future__ import annotations

import jax
from flax import nnx

from jaxserve.errors import ConfigError
from jaxserve.layers.linear import linear
from jaxserve.layers.params import LayerContext
from jaxserve.layers.rope import RopeAngles
from pallas_kernels.dispatch import AttentionMetadata, AttentionOptions


def stored_kv_heads(num_heads: int, num_kv_heads: int, tensor_parallel_size: int) -> int:
    """KV heads stored: each is replicated when the tensor-parallel size exceeds their number.

    Raises:
        ConfigError: when the heads cannot be split evenly.
    """
    stored = max(num_kv_heads, tensor_parallel_size)
    if stored % tensor_parallel_size or stored % num_kv_heads or num_heads % stored:
        raise ConfigError(
            f"tensor_parallel_size {tensor_parallel_size} does not split {num_heads} query heads and {num_kv_heads} "
            "key/value heads evenly.",
            param="tensor_parallel_size",
        )
    return stored


class Attention(nnx.Module):
    """One layer's attention.

    ``qkv`` is [M, K, G + 2, D]: per KV head its G query heads, then its key, then its value, so that splitting K
    over devices keeps each group together. ``out`` is [K, G, D, M].
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        options: AttentionOptions,
        context: LayerContext,
    ) -> None:
        group = num_heads // num_kv_heads
        self.qkv = context.param(
            (hidden_size, num_kv_heads, group + 2, head_size), ("embed", "kv_heads", None, "head_dim")
        )
        self.out = context.param(
            (num_kv_heads, group, head_size, hidden_size), ("kv_heads", None, "head_dim", "embed")
        )
        self.options = options
        self.context = context

    def __call__(
        self,
        x: jax.Array,
        rope: RopeAngles,
        kv_cache: jax.Array,
        metadata: AttentionMetadata,
        *,
        qk_norm: nnx.Module | None = None,
        layer: int = 0,
        qkv_bias: jax.Array | None = None,
        out_bias: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Attend.

        Args:
            x: [T, M], normalised.
            rope: the step's angles.
            kv_cache: this layer's cache.
            metadata: the step's batch.
            qk_norm: norm of each query and key head, called with ([T, K, G + 1, D], layer).
            layer: index of this layer, for ``qk_norm``.
            qkv_bias: [K, G + 2, D].
            out_bias: [M].

        Returns:
            ([T, M], the updated cache).
        """
        qkv = linear(x, self.qkv[...], "tm,mknd->tknd", qkv_bias)
        qkv = self.context.constrain(qkv, ("tokens", "kv_heads", None, "head_dim"))
        qk, v = qkv[:, :, :-1], qkv[:, :, -1]
        if qk_norm is not None:
            qk = qk_norm(qk, layer)
        qk = rope.rotate(qk)
        q, k = qk[:, :, :-1], qk[:, :, -1]
        num_tokens, num_kv_heads, group, head_size = q.shape
        attended, kv_cache = self.context.backend.update_and_attend(
            q.reshape(num_tokens, num_kv_heads * group, head_size), k, v, kv_cache, metadata, self.options
        )
        attended = attended.reshape(q.shape)
        return linear(attended, self.out[...], "tkgd,kgdm->tm", out_bias), kv_cache
