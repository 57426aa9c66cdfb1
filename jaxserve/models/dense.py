"""What the dense Llama-like families share: reading config.json, and where checkpoint tensors go."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.errors import UnsupportedModelError
from jaxserve.layers.decoder import Decoder, DecoderConfig
from jaxserve.layers.embedding import padded_vocab_size
from jaxserve.layers.params import LayerContext
from jaxserve.layers.rope import RopeConfig
from jaxserve.weights.weight_map import WeightSource

LAYER_TYPES = ("full_attention", "sliding_attention")


def decoder_config(
    config: Mapping[str, Any],
    *,
    sliding_windows: tuple[int | None, ...] | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    head_size: int | None = None,
) -> DecoderConfig:
    """Map the keys that all these families spell alike; the rest are the family's differences.

    Raises:
        UnsupportedModelError: a key that is missing, malformed, or asks for something not implemented.
    """
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act {activation!r} is not supported; only 'silu' is.")
    num_layers = positive(config, "num_hidden_layers")
    num_heads = positive(config, "num_attention_heads")
    num_kv_heads = positive(config, "num_key_value_heads", num_heads)
    hidden_size = positive(config, "hidden_size")
    if num_heads % num_kv_heads:
        raise UnsupportedModelError(
            f"num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}."
        )
    return DecoderConfig(
        vocab_size=positive(config, "vocab_size"),
        hidden_size=hidden_size,
        ffn_size=positive(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=positive(config, "head_dim", head_size or hidden_size // num_heads),
        rms_norm_eps=float(config.get("rms_norm_eps") or 1e-6),
        rope=RopeConfig.from_hf(config),
        max_position_embeddings=positive(config, "max_position_embeddings"),
        sliding_windows=sliding_windows or (None,) * num_layers,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def positive(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer of the config; null counts as absent.

    Raises:
        UnsupportedModelError: when it is absent without a default, or is no positive integer.
    """
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise UnsupportedModelError(f"config.json has no {key!r}.")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"config.json's {key!r} must be a positive integer, got {value!r}.")
    return value


def layerwise_windows(config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Qwen's windows: with ``use_sliding_window``, the layers that ``layer_types`` names, or else those from
    ``max_window_layers`` on."""
    num_layers = positive(config, "num_hidden_layers")
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    window = positive(config, "sliding_window")
    kinds = config.get("layer_types")
    if kinds is None:
        first = config.get("max_window_layers", 28)
        kinds = [LAYER_TYPES[i >= first] for i in range(num_layers)]
    unknown = [kind for kind in kinds if kind not in LAYER_TYPES]
    if unknown or len(kinds) != num_layers:
        raise UnsupportedModelError(f"layer_types {list(kinds)!r} must name {num_layers} of {LAYER_TYPES}.")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


class DenseCausalLM(Decoder):
    """The shared decoder as a CausalLM whose tensors carry the names that all these families use."""

    def __init__(self, config: DecoderConfig, context: LayerContext) -> None:
        super().__init__(config, context)
        self.vocab_size = config.vocab_size
        self.hidden_size = config.hidden_size
        self.max_position_embeddings = config.max_position_embeddings
        self.num_heads = config.num_heads
        self.attention_options = frozenset(layer.attention.options for layer in self.layers)

    def weight_map(self) -> list[WeightSource]:
        """Every tensor of the checkpoint, by Hugging Face name."""
        sources = weight_map(
            self.config,
            self.context.tensor_parallel_size,
            self.attention_sources,
            self.feed_forward_sources,
        )
        return sources + (kv_scale_sources(self.config.num_layers) if self.kv_scales is not None else [])

    def attention_sources(self, name: str, target: str) -> list[WeightSource]:
        """Where the tensors of a layer's attention go: those of ``name`` to ``target``."""
        return attention_sources(self.config, self.num_kv_heads, name, target)

    def feed_forward_sources(self, layer: int, name: str, target: str) -> list[WeightSource]:
        """Where the tensors of a layer's feed-forward go: those of ``{name}.mlp`` to ``{target}.mlp``."""
        return dense_sources(self.config, name, target)


def weight_map(
    config: DecoderConfig,
    tensor_parallel_size: int,
    attention_sources: Callable[[str, str], list[WeightSource]],
    feed_forward_sources: Callable[[int, str, str], list[WeightSource]],
) -> list[WeightSource]:
    """Where each tensor goes.

    Args:
        config: the decoder.
        tensor_parallel_size: devices that split the vocabulary.
        attention_sources: the tensors of a layer's attention, by its name and target.
        feed_forward_sources: the tensors of a layer's feed-forward, by its number and the layer's name and target.
    """
    vocab, hidden, layers = config.vocab_size, config.hidden_size, config.num_layers
    rows = padded_vocab_size(vocab, tensor_parallel_size)
    live = slice(0, vocab)
    sources = [
        WeightSource("model.embed_tokens.weight", (vocab, hidden), "embedding", (rows, hidden), (live,)),
        WeightSource("model.norm.weight", (hidden,), "final_norm", (hidden,)),
    ]
    if not config.tie_word_embeddings:
        sources.append(WeightSource("lm_head.weight", (vocab, hidden), "lm_head", (rows, hidden), (live,)))
    for layer in range(layers):
        name, target = f"model.layers.{layer}", f"layers.{layer}"
        sources += attention_sources(f"{name}.self_attn", f"{target}.attention")
        sources += feed_forward_sources(layer, name, target)
        for part, norm in (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "mlp_norm")):
            sources.append(WeightSource(f"{name}.{part}.weight", (hidden,), norm, (layers, hidden), (layer,)))
    return sources


def kv_scale_sources(num_layers: int) -> list[WeightSource]:
    """Scales of a float8 cache, by the names that compressed-tensors and ModelOpt give them; 1 where there are none."""
    return [
        WeightSource(
            f"model.layers.{layer}.self_attn.{part}_scale", (), "kv_scales", (num_layers, 2), (layer, i), (),
            aliases=(f"model.layers.{layer}.self_attn.{part}_proj.{part}_scale",), default=1.0,
        )
        for layer in range(num_layers)
        for i, part in enumerate("kv")
    ]  # fmt: skip


def attention_sources(
    config: DecoderConfig, stored_kv_heads: int, name: str, target: str
) -> list[WeightSource]:
    """q, k and v of a layer into the fused form, and the output product.

    A replicated KV head is written ``copies`` times; its query heads are dealt out over the copies in order.
    """
    hidden, heads, kv_heads, size = (
        config.hidden_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_size,
    )
    copies, group = stored_kv_heads // kv_heads, heads // stored_kv_heads
    rows = (kv_heads, copies, group + 2, size)
    slots = {"q": slice(0, group), "k": slice(group, group + 1), "v": slice(group + 1, group + 2)}
    inputs = heads * size
    sources = [WeightSource(f"{name}.o_proj.weight", (hidden, inputs), f"{target}.out", (hidden, inputs))]
    if config.out_bias:
        sources.append(WeightSource(f"{name}.o_proj.bias", (hidden,), f"{target}.out_bias", (hidden,)))
    for part, slot in slots.items():
        split = (kv_heads, copies, group, size) if part == "q" else (kv_heads, 1, 1, size)
        sources += _rows(f"{name}.{part}_proj", f"{target}.qkv", hidden, split, rows, slot, config.qkv_bias)
        if config.qk_norm and part != "v":
            sources.append(
                WeightSource(
                    f"{name}.{part}_norm.weight", (size,), f"{target}.qk_norm", (group + 1, size), (slot,)
                )
            )
    if config.sinks:
        sources.append(WeightSource(f"{name}.sinks", (heads,), f"{target}.sinks", (heads,)))
    return sources


def dense_sources(config: DecoderConfig, name: str, target: str) -> list[WeightSource]:
    """The feed-forward of a dense layer of this name."""
    return mlp_sources(
        config.hidden_size, config.ffn_size, f"{name}.mlp", f"{target}.mlp", bias=config.mlp_bias
    )


def mlp_sources(hidden: int, ffn: int, name: str, target: str, *, bias: bool = False) -> list[WeightSource]:
    """A ``GatedMLP``: gate and up in one."""
    split, rows = (1, ffn), (2, ffn)
    sources = [WeightSource(f"{name}.down_proj.weight", (hidden, ffn), f"{target}.down", (hidden, ffn))]
    if bias:
        sources.append(WeightSource(f"{name}.down_proj.bias", (hidden,), f"{target}.down_bias", (hidden,)))
    for i, part in enumerate(("gate", "up")):
        slot = slice(i, i + 1)
        sources += _rows(f"{name}.{part}_proj", f"{target}.gate_up", hidden, split, rows, slot, bias)
    return sources


def _rows(
    name: str,
    target: str,
    inputs: int,
    split: tuple[int, ...],
    rows: tuple[int, ...],
    slot: slice,
    bias: bool,
) -> list[WeightSource]:
    """A product's weight (and bias) as some of the rows of a fused one.

    Args:
        name: of the product in the checkpoint, where its weight is [outputs, inputs].
        target: the fused weight, [all rows, inputs]; its bias is named after it.
        inputs: size of the contracted dimension.
        split: how the product's outputs divide, the last two being (heads or halves, elements).
        rows: how the fused rows divide, likewise.
        slot: the part of the last dimension but one that is this product's.
        bias: whether it has one.
    """
    outputs = math.prod(split)
    index = (..., slot, slice(None))
    sources = [
        WeightSource(
            f"{name}.weight",
            (outputs, inputs),
            target,
            (*rows, inputs),
            (*index, slice(None)),
            (*split, inputs),
        )
    ]
    if bias:
        sources.append(WeightSource(f"{name}.bias", (outputs,), f"{target}_bias", rows, index, split))
    return sources
