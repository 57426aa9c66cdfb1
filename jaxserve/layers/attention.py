"""Self-attention over the paged cache: the q, k and v product, rotation, the backend, the output product."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx

from jaxserve.errors import ConfigError
from jaxserve.layers.linear import linear, onto_stream
from jaxserve.layers.params import LayerContext, StreamNorm, value_of
from jaxserve.layers.rope import RopeAngles
from pallas_kernels.dispatch import AttentionMetadata, AttentionOptions
from pallas_kernels.kv_cache_update.quantized import KVCache, scale_in, scale_out


def stored_kv_heads(num_heads: int, num_kv_heads: int, tensor_parallel_size: int) -> int:
    """KV heads stored: each is replicated when the tensor-parallel size exceeds their number.

    Raises:
        ConfigError: when the heads cannot be split evenly, with the sizes that can.
    """
    stored = max(num_kv_heads, tensor_parallel_size)
    if not _splits(num_heads, num_kv_heads, tensor_parallel_size):
        fitting = [str(n) for n in range(1, num_heads + 1) if _splits(num_heads, num_kv_heads, n)]
        raise ConfigError(
            f"tensor_parallel_size {tensor_parallel_size} does not split {num_heads} query heads and "
            f"{num_kv_heads} key/value heads evenly; sizes that do: {', '.join(fitting)}.",
            param="tensor_parallel_size",
        )
    return stored


def _splits(num_heads: int, num_kv_heads: int, tensor_parallel_size: int) -> bool:
    stored = max(num_kv_heads, tensor_parallel_size)
    return not (stored % tensor_parallel_size or stored % num_kv_heads or num_heads % stored)


class Attention(nnx.Module):
    """One layer's attention.

    The weights are matrices, whose layout suits the products on every device. ``qkv`` is [K (G + 2) D, M]:
    per KV head its G query heads, then its key, then its value, so that splitting the rows keeps each
    group together. ``out`` is [M, H D].
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        options: AttentionOptions,
        context: LayerContext,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        sinks: bool = False,
    ) -> None:
        """``qk_norm_eps`` not None: each query and key head is normalised before its rotation. ``sinks``: each query
        head's softmax has one more logit in its denominator."""
        group = num_heads // num_kv_heads
        rows = num_kv_heads * (group + 2) * head_size
        self.head_shape = (group + 2, head_size)
        self.qkv = context.param((rows, hidden_size), ("kv_heads", "embed"))
        self.qkv_bias = context.param((rows,), ("kv_heads",), scale=0.0) if qkv_bias else None
        self.out = context.param((hidden_size, num_heads * head_size), ("embed", "heads"))
        self.out_bias = context.param((hidden_size,), ("embed",), scale=0.0) if out_bias else None
        # The query heads' weight G times, then the key's.
        norm_shape, norm_axes = (group + 1, head_size), (None, "head_dim")
        has_norm = qk_norm_eps is not None
        self.qk_norm = context.param(norm_shape, norm_axes, scale=0.0, mean=1.0) if has_norm else None
        self.qk_norm_eps = qk_norm_eps
        self.sinks = context.param((num_heads,), ("heads",), scale=0.0) if sinks else None
        self.options = options
        self.context = context

    def __call__(
        self,
        x: jax.Array,
        rope: RopeAngles,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        plan: Any,
        kv_scales: jax.Array | None,
        stream: StreamNorm,
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        """Attend, with this device's heads.

        Args:
            x: [T, M], normalised.
            rope: the step's angles.
            kv_cache: this layer's cache.
            metadata: the step's batch.
            plan: the backend's, for this step and these options.
            kv_scales: float32 [2], what cached keys and values are multiplied by; None: they are as they are.
            stream: what the result is added to, and the norm of that.

        Returns:
            (the stream, [T, M], or this device's tokens of it where tokens are shared; its norms, [T, M]; the updated
            cache).
        """
        num_tokens = x.shape[0]
        qkv = linear(
            x, self.qkv[...], value_of(self.qkv_bias), weight_first=self.context.weight_first,
            kernel=self.context.dense_matmul,
        )  # fmt: skip
        q, k, v = self._split(qkv.reshape(num_tokens, -1, *self.head_shape), rope)
        if kv_scales is not None:
            q, k, v = scale_in(q, k, v, kv_scales[0], kv_scales[1])
        attended, kv_cache = self.context.backend.update_and_attend(
            q, k, v, kv_cache, metadata, self.options, value_of(self.sinks), plan
        )
        if kv_scales is not None:
            attended = scale_out(attended, kv_scales[1], k.shape[1])
        attended = attended.reshape(num_tokens, -1)
        hidden, normal = onto_stream(attended, self.out[...], value_of(self.out_bias), self.context, stream)
        return hidden, normal, kv_cache

    def _split(self, qkv: jax.Array, rope: RopeAngles) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [T, H, D] and keys [T, K, D], normalised where that is asked for and rotated, and values, out of
        [T, K, G + 2, D]."""
        num_tokens, size = qkv.shape[0], qkv.shape[-1]
        weights, kernel = value_of(self.qk_norm), self.context.split_heads
        if kernel is not None and kernel.why_not(num_tokens, size, qkv.dtype) is None:
            return kernel(qkv, rope.cos[:, 0, 0], rope.sin[:, 0, 0], weights, self.qk_norm_eps or 0.0)
        qk, v = qkv[:, :, :-1], qkv[:, :, -1]
        if weights is not None and self.qk_norm_eps is not None:
            qk = self.context.rms_norm(qk, weights, self.qk_norm_eps)
        qk = rope.rotate(qk)
        return qk[:, :, :-1].reshape(num_tokens, -1, size), qk[:, :, -1], v
