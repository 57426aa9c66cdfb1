"""The dense pre-norm decoder that the Llama-like families share: they differ in config, biases, norms and windows."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.errors import ConfigError
from jaxserve.kv_cache_spec import KVCacheSpec
from jaxserve.layers.attention import Attention, stored_kv_heads
from jaxserve.layers.embedding import Embedding, LMHead
from jaxserve.layers.mlp import GatedMLP
from jaxserve.layers.norm import StackedRMSNorm, rms_norm
from jaxserve.layers.params import LayerContext
from jaxserve.layers.rope import RopeAngles, RopeConfig
from pallas_kernels.dispatch import AttentionMetadata, AttentionOptions


@dataclass(frozen=True)
class DecoderConfig:
    """A dense decoder's shape, in jaxserve's words.

    Args:
        vocab_size, hidden_size, ffn_size, num_layers, num_heads, num_kv_heads, head_size: V, M, F, L, H, K, D.
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
    """The large weights of one layer; its vectors live in the decoder, stacked over the layers."""

    def __init__(self, config: DecoderConfig, num_kv_heads: int, layer: int, context: LayerContext) -> None:
        options = AttentionOptions(config.head_size**-0.5, config.sliding_windows[layer])
        self.attention = Attention(
            config.hidden_size, config.num_heads, num_kv_heads, config.head_size, options, context
        )
        self.mlp = GatedMLP(config.hidden_size, config.ffn_size, context)


class LayerBiases(nnx.Module):
    """Biases of all layers, each kind one [L, ...] array; a kind the model lacks is None."""

    def __init__(self, config: DecoderConfig, num_kv_heads: int, context: LayerContext) -> None:
        layers, hidden = config.num_layers, config.hidden_size
        group = config.num_heads // num_kv_heads

        def bias(
            wanted: bool, shape: tuple[int, ...], axes: tuple[str | None, ...]
        ) -> nnx.Param[jax.Array] | None:
            return context.param((layers, *shape), ("layers", *axes), scale=0.0) if wanted else None

        self.qkv = bias(
            config.qkv_bias, (num_kv_heads, group + 2, config.head_size), ("kv_heads", None, "head_dim")
        )
        self.out = bias(config.out_bias, (hidden,), ("embed",))
        self.gate_up = bias(config.mlp_bias, (2, config.ffn_size), (None, "ffn"))
        self.down = bias(config.mlp_bias, (hidden,), ("embed",))

    def of(self, kind: str, layer: int) -> jax.Array | None:
        """One layer's bias of a kind (an attribute's name)."""
        stacked = getattr(self, kind)
        return None if stacked is None else stacked[layer]


class Decoder(nnx.Module):
    """Embedding, L layers of attention and feed-forward with residuals, final norm, logits."""

    def __init__(self, config: DecoderConfig, context: LayerContext) -> None:
        if config.ffn_size % context.tensor_parallel_size:
            raise ConfigError(
                f"tensor_parallel_size {context.tensor_parallel_size} does not divide the feed-forward size "
                f"{config.ffn_size}.",
                param="tensor_parallel_size",
            )
        num_kv_heads = stored_kv_heads(config.num_heads, config.num_kv_heads, context.tensor_parallel_size)
        group = config.num_heads // num_kv_heads
        layers, hidden, eps = config.num_layers, config.hidden_size, config.rms_norm_eps
        self.config = config
        self.context = context
        self.num_kv_heads = num_kv_heads
        self.embedding = Embedding(config.vocab_size, hidden, context)
        self.lm_head = None if config.tie_word_embeddings else LMHead(config.vocab_size, hidden, context)
        self.input_norm = StackedRMSNorm((layers, hidden), eps, context)
        self.mlp_norm = StackedRMSNorm((layers, hidden), eps, context)
        self.qk_norm = (
            StackedRMSNorm((layers, group + 1, config.head_size), eps, context) if config.qk_norm else None
        )
        self.final_norm = context.param((hidden,), ("embed",), scale=0.0, mean=1.0)
        self.biases = LayerBiases(config, num_kv_heads, context)
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
                attended, kv_cache = layer.attention(
                    self.input_norm(hidden, i), rope, kv_caches[i], metadata,
                    qk_norm=self.qk_norm, layer=i,
                    qkv_bias=self.biases.of("qkv", i), out_bias=self.biases.of("out", i),
                )  # fmt: skip
                hidden = hidden + attended
                hidden = hidden + layer.mlp(
                    self.mlp_norm(hidden, i), self.biases.of("gate_up", i), self.biases.of("down", i)
                )
                hidden = self.context.constrain(hidden, ("tokens", "embed"))
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
