"""The pre-norm decoder that the Llama-like families share; they differ in biases, norms, windows and experts."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.errors import ConfigError
from jaxserve.kv_cache_spec import KVCacheSpec
from jaxserve.layers.attention import Attention, stored_kv_heads
from jaxserve.layers.embedding import Embedding, LMHead
from jaxserve.layers.mla import LatentAttention, MLAConfig
from jaxserve.layers.mlp import GatedMLP, check_ffn_size
from jaxserve.layers.moe import MoE, MoEConfig
from jaxserve.layers.norm import StackedNormWeights
from jaxserve.layers.params import LayerContext, StackedWeight, StreamNorm
from jaxserve.layers.rope import RopeAngles, RopeConfig
from pallas_kernels.all_reduce.peers import current_peers, reaching
from pallas_kernels.dispatch import AttentionMetadata, AttentionOptions
from pallas_kernels.kv_cache_update.quantized import KVCache


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder's shape, in jaxserve's words.

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
        sinks: each query head has one more logit in the denominator of its softmax.
        experts: per layer, its experts; None is a layer with one feed-forward, and so are all of an empty tuple.
        mla: attention is that of latents, of which each token caches one: K is 1 and D its size.
        attention_scale: multiplies q . k; None is D ** -0.5.
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
    sinks: bool = False
    experts: tuple[MoEConfig | None, ...] = ()
    mla: MLAConfig | None = None
    attention_scale: float | None = None

    def experts_of(self, layer: int) -> MoEConfig | None:
        """A layer's experts."""
        return self.experts[layer] if self.experts else None

    @property
    def rotated_size(self) -> int:
        """Elements of a query or key that are rotated."""
        return self.head_size if self.mla is None else self.mla.rope_size

    def attention_options(self, layer: int) -> AttentionOptions:
        """What is fixed for a layer's attention."""
        scale = self.head_size**-0.5 if self.attention_scale is None else self.attention_scale
        return AttentionOptions(scale, self.sliding_windows[layer])


class DecoderLayer(nnx.Module):
    """Attention and feed-forward of one layer."""

    def __init__(self, config: DecoderConfig, num_kv_heads: int, layer: int, context: LayerContext) -> None:
        self.attention = _attention(config, num_kv_heads, layer, context)
        self.mlp = _feed_forward(config, layer, context)
        self.norm_eps = config.rms_norm_eps

    def __call__(
        self,
        hidden: jax.Array,
        normal: jax.Array,
        norm_weights: tuple[jax.Array | StackedWeight, jax.Array | StackedWeight],
        rope: RopeAngles,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
        plan: Any,
        kv_scales: jax.Array | None,
    ) -> tuple[jax.Array, jax.Array, KVCache, jax.Array | None]:
        """One layer's work on the residual stream.

        Args:
            hidden: the residual stream, [T, M]; where tokens are shared, this device's of them.
            normal: [T, M], its norms.
            norm_weights: [M] each or one of [L, M], of the norms before the feed-forward and after the layer.
            rope, kv_cache, metadata, plan, kv_scales: as ``Attention`` takes them.

        Returns:
            (the stream, its norms, the updated cache; of a layer with experts, int32 [E]: the tokens that each got).
        """
        stream = StreamNorm(hidden, norm_weights[0], self.norm_eps)
        hidden, normal, kv_cache = self.attention(normal, rope, kv_cache, metadata, plan, kv_scales, stream)
        stream = StreamNorm(hidden, norm_weights[1], self.norm_eps)
        if not isinstance(self.mlp, MoE):
            return *self.mlp.onto(normal, stream), kv_cache, None
        live = jnp.arange(normal.shape[0]) < metadata.query_start_loc[-1]
        hidden, normal, load = self.mlp.onto(normal, live, stream)
        return hidden, normal, kv_cache, load


def _attention(
    config: DecoderConfig, num_kv_heads: int, layer: int, context: LayerContext
) -> Attention | LatentAttention:
    options = config.attention_options(layer)
    if config.mla is not None:
        return LatentAttention(config.hidden_size, config.num_heads, config.mla, options, context)
    return Attention(
        config.hidden_size,
        config.num_heads,
        num_kv_heads,
        config.head_size,
        options,
        context,
        qkv_bias=config.qkv_bias,
        out_bias=config.out_bias,
        qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
        sinks=config.sinks,
    )


def _feed_forward(config: DecoderConfig, layer: int, context: LayerContext) -> GatedMLP | MoE:
    experts = config.experts_of(layer)
    if experts is not None:
        return MoE(config.hidden_size, experts, context)
    check_ffn_size(config.ffn_size, context.tensor_parallel_size)
    return GatedMLP(config.hidden_size, config.ffn_size, context, bias=config.mlp_bias)


@functools.partial(jax.jit, static_argnums=0)
def _run_layer(
    graphdef: Any, state: Any, peers: jax.Array | None, *args: Any
) -> tuple[jax.Array, jax.Array, KVCache, jax.Array | None]:
    """A layer as a function of its weights: equal layers are traced and lowered once, not L times."""
    with reaching(peers):
        return nnx.merge(graphdef, state)(*args)


class Decoder(nnx.Module):
    """Embedding, L layers of attention and feed-forward with residuals, final norm, logits."""

    def __init__(self, config: DecoderConfig, context: LayerContext) -> None:
        num_kv_heads = config.num_kv_heads
        if config.mla is None:
            num_kv_heads = stored_kv_heads(config.num_heads, num_kv_heads, context.tensor_parallel_size)
        config.rope.frequencies(
            config.rotated_size
        )  # refuses incomplete rope parameters now, not in the first step
        layers, hidden = config.num_layers, config.hidden_size
        self.config = config
        self.context = context
        self.num_kv_heads = num_kv_heads
        self.embedding = Embedding(config.vocab_size, hidden, context)
        self.lm_head = None if config.tie_word_embeddings else LMHead(config.vocab_size, hidden, context)
        self.attention_norm = StackedNormWeights(layers, hidden, context)
        self.mlp_norm = StackedNormWeights(layers, hidden, context)
        self.final_norm = context.param((hidden,), ("embed",), scale=0.0, mean=1.0)
        # What cached keys (0) and values (1) of each layer are multiplied by.
        scales = context.param((layers, 2), ("layers", None), scale=0.0, mean=1.0, dtype=np.dtype(np.float32))
        self.kv_scales = scales if context.scaled_kv_cache and config.mla is None else None
        self.layers = nnx.List([DecoderLayer(config, num_kv_heads, i, context) for i in range(layers)])
        self.has_experts = any(config.experts)

    def __call__(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
    ) -> tuple[jax.Array, list[KVCache]]:
        """One step over T tokens: ([T, M] hidden states after the final norm, the updated caches)."""
        return self.run(token_ids, positions, kv_caches, metadata)[:2]

    def run(
        self,
        token_ids: jax.Array,
        positions: jax.Array,
        kv_caches: list[KVCache],
        metadata: AttentionMetadata,
    ) -> tuple[jax.Array, list[KVCache], list[jax.Array]]:
        """``__call__``, and of each layer with experts int32 [E]: the tokens that each of them got, of this rank's."""
        rope = RopeAngles.at(positions, *self.config.rope.frequencies(self.config.rotated_size))
        hidden, eps = self.embedding(token_ids), self.config.rms_norm_eps
        norms = self._norms(token_ids.shape[0])
        normal = self.context.normal(hidden, norms[0][0], eps, token_ids.shape[0])
        plans = self._plans(token_ids.shape[0], metadata, kv_caches)
        new_caches: list[KVCache] = []
        loads: list[jax.Array] = []
        for i, layer in enumerate(self.layers):
            weights = self._norms_in(i, token_ids.shape[0], *norms)
            plan = plans[layer.attention.options]
            kv_scales = None if self.kv_scales is None else self.kv_scales[...][i]
            arguments = hidden, normal, weights, rope, kv_caches[i], metadata, plan, kv_scales
            hidden, normal, kv_cache, load = _run_layer(*nnx.split(layer), current_peers(), *arguments)
            new_caches.append(kv_cache)
            loads += [] if load is None else [load]
        # Without a use for the last layer's stream it would be traced and lowered as a function of its own.
        normal, _ = jax.lax.optimization_barrier((normal, hidden))
        return normal, new_caches, loads

    def _norms(self, num_tokens: int) -> tuple[list[jax.Array], list[jax.Array]]:
        """Weights [M] of every layer's norms before its attention and before its feed-forward."""
        both = self.attention_norm, self.mlp_norm
        adds = self.context.adds_and_norms(num_tokens, self.config.hidden_size)
        if self.context.add_norm is not None and not adds:  # a GPU
            return both[0].apart(), both[1].apart()
        layers = range(len(self.layers))
        return [both[0].of(i) for i in layers], [both[1].of(i) for i in layers]

    def _norms_in(
        self, layer: int, num_tokens: int, attention_norms: list[jax.Array], mlp_norms: list[jax.Array]
    ) -> tuple[jax.Array | StackedWeight, jax.Array | StackedWeight]:
        """Weights of the norms before a layer's feed-forward and after the layer."""
        last = layer + 1 == len(self.layers)
        after = self.final_norm[...] if last else attention_norms[layer + 1]
        if not self.context.adds_and_norms(num_tokens, self.config.hidden_size):
            return mlp_norms[layer], after
        between = self.mlp_norm.stacked(layer)
        if self.context.tensor_parallel_size == 1 and self.config.experts_of(layer) is not None:
            return between, after  # experts' results are the first of 8 rows: XLA cuts them out as it norms
        if last:
            return between, StackedWeight(self.final_norm[...][None], jnp.zeros(1, jnp.int32))
        return between, self.attention_norm.stacked(layer + 1)

    def _plans(
        self, num_tokens: int, metadata: AttentionMetadata, kv_caches: list[KVCache]
    ) -> dict[AttentionOptions, Any]:
        """The backend's plan of this step, once for all layers with equal options."""
        cache_of = {
            layer.attention.options: cache for layer, cache in zip(self.layers, kv_caches, strict=True)
        }
        if self.config.mla is not None:
            return dict.fromkeys(cache_of)
        heads = self.config.num_heads // self.context.tensor_parallel_size
        kv_heads = self.num_kv_heads // self.context.tensor_parallel_size
        sizes = {
            "num_tokens": num_tokens,
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_size": self.config.head_size,
        }
        prepare = self.context.backend.prepare
        return {each: prepare(metadata, each, kv_cache=cache, **sizes) for each, cache in cache_of.items()}

    def logits(self, hidden: jax.Array) -> jax.Array:
        """[R, V] float32 scores of hidden states [R, M]; under tensor parallelism this device's columns."""
        head = self.embedding if self.lm_head is None else self.lm_head
        return head.logits(hidden)

    def kv_cache_specs(self, dtype: str | None = None) -> list[KVCacheSpec]:
        """What each layer caches; ``dtype`` names the cache's element type, the compute type by default.

        Raises:
            ConfigError: latents in a type of one byte.
        """
        config, element = self.config, jnp.dtype(self.context.dtype if dtype is None else dtype)
        if config.mla is not None and element.itemsize == 1:
            raise ConfigError(
                f"kv_cache_dtype {element.name} is not supported for latent attention (MLA), whose cache is small "
                "already; use auto, bfloat16, float16 or float32.",
                param="kv_cache_dtype",
            )
        rank = None if config.mla is None else config.mla.rank
        return [
            KVCacheSpec(self.num_kv_heads, config.head_size, element.name, element.itemsize, window, rank)
            for window in config.sliding_windows
        ]
