"""The dense pre-norm decoder that the Llama-like families share; they differ in biases, norms and windows."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.kv_cache_spec import KVCacheSpec
from jaxserve.layers.attention import Attention, stored_kv_heads
from jaxserve.layers.embedding import Embedding, LMHead
from jaxserve.layers.layer_vectors import LayerVectors, StackedVectors
from jaxserve.layers.mlp import GatedMLP, check_ffn_size
from jaxserve.layers.norm import rms_norm
from jaxserve.layers.params import LayerContext
from jaxserve.layers.rope import RopeAngles, RopeConfig
from pallas_kernels.dispatch import AttentionMetadata, AttentionOptions


@dataclass(frozen=True)
class DecoderConfig:
    """A dense decoder's shape, in jaxserve's words.

    Args:
        vocab_size, hidden_size, ffn_size: V, M, F.
        num_layers, num_heads, num_kv_heads, head_size: L, H, K, D.
        rms_norm_eps: added to the mean square.
        rope: positions to angles.
        max_position_embeddings: longest context the model was made for.
        sliding_windows: per layer, tokens a query sees (itself included); None sees all.
        tie_word_embeddings: logits reuse the embedding.
        qkv_bias, out_bias, mlp_bias: which products carry a bias.
        qk_norm: each query and key head is normalised before its rotation.
    """

    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False


class DecoderLayer(nnx.Module):
    """One layer: its large weights. Its vectors live in the decoder, stacked over the layers."""

    def __init__(self, config: DecoderConfig, num_kv_heads: int, layer: int, context: LayerContext) -> None:
        options = AttentionOptions(config.head_size**-0.5, config.sliding_windows[layer])
        self.attention = Attention(
            config.hidden_size, config.num_heads, num_kv_heads, config.head_size, options, context,
            config.rms_norm_eps,
        )  # fmt: skip
        self.mlp = GatedMLP(config.hidden_size, config.ffn_size, context)
        self.eps = config.rms_norm_eps
        self.context = context

    def __call__(
        self,
        hidden: jax.Array,
        rope: RopeAngles,
        kv_cache: jax.Array,
        metadata: AttentionMetadata,
        vectors: LayerVectors,
    ) -> tuple[jax.Array, jax.Array]:
        """([T, M] residual stream after the layer, the updated cache)."""
        normal = rms_norm(hidden, vectors.input_norm, self.eps)
        attended, kv_cache = self.attention(normal, rope, kv_cache, metadata, vectors)
        hidden = hidden + attended
        normal = rms_norm(hidden, vectors.mlp_norm, self.eps)
        hidden = hidden + self.mlp(normal, vectors.gate_up_bias, vectors.down_bias)
        return self.context.constrain(hidden, ("tokens", "embed")), kv_cache


class Decoder(nnx.Module):
    """Embedding, L layers of attention and feed-forward with residuals, final norm, logits."""

    def __init__(self, config: DecoderConfig, context: LayerContext) -> None:
        check_ffn_size(config.ffn_size, context.tensor_parallel_size)
        num_kv_heads = stored_kv_heads(config.num_heads, config.num_kv_heads, context.tensor_parallel_size)
        group, size = config.num_heads // num_kv_heads, config.head_size
        layers, hidden = config.num_layers, config.hidden_size
        config.rope.frequencies(size)  # refuses incomplete rope parameters now rather than in the first step
        self.config = config
        self.context = context
        self.num_kv_heads = num_kv_heads
        self.embedding = Embedding(config.vocab_size, hidden, context)
        self.lm_head = None if config.tie_word_embeddings else LMHead(config.vocab_size, hidden, context)
        self.vectors = StackedVectors(
            layers,
            hidden,
            context,
            qk_norm_shape=(group + 1, size) if config.qk_norm else None,
            qkv_bias_size=num_kv_heads * (group + 2) * size if config.qkv_bias else None,
            out_bias=config.out_bias,
            gate_up_bias_size=2 * config.ffn_size if config.mlp_bias else None,
        )
        self.final_norm = context.param((hidden,), ("embed",), scale=0.0, mean=1.0)
        self.layers = nnx.List([DecoderLayer(config, num_kv_heads, i, context) for i in range(layers)])

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv_caches: list[jax.Array],
        metadata: AttentionMetadata,
    ) -> tuple[jax.Array, list[jax.Array]]:
        """One step over T tokens: ([T, M] hidden states after the final norm, the updated caches)."""
        rope = RopeAngles.at(positions, *self.config.rope.frequencies(self.config.head_size))
        hidden = self.embedding(token_ids)
        new_caches: list[jax.Array] = []
        for i, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{i}"):
                hidden, kv_cache = layer(hidden, rope, kv_caches[i], metadata, self.vectors.of(i))
            new_caches.append(kv_cache)
        return rms_norm(hidden, self.final_norm[...], self.config.rms_norm_eps), new_caches

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[R, V] float32 scores of hidden states [R, M]."""
        head = self.embedding if self.lm_head is None else self.lm_head
        return head.logits(hidden)

    def kv_cache_specs(self, dtype: str | None = None) -> list[KVCacheSpec]:
        """What each layer caches; ``dtype`` names the cache's element type, the compute type by default."""
        element = jnp.dtype(self.context.dtype if dtype is None else dtype)
        return [
            KVCacheSpec(self.num_kv_heads, self.config.head_size, element.name, element.itemsize, window)
            for window in self.config.sliding_windows
        ]
