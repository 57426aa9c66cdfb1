"""gpt-oss: experts in every layer, attention with sinks, windows in every other layer, biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.layers.moe import ClampedSwiGLU, MoEConfig
from jaxserve.layers.params import LayerContext
from jaxserve.layers.router import RouterConfig
from jaxserve.models.dense import decoder_config, layerwise_windows, positive
from jaxserve.models.experts import ExpertsCausalLM, num_experts, top_k_of
from jaxserve.weights.weight_map import WeightSource

ARCHITECTURES = ("GptOssForCausalLM",)
QUANTIZATION_METHODS = ("mxfp4",)
"""Checkpoints so quantized are read, and their experts made the compute type."""


class GptOssCausalLM(ExpertsCausalLM):
    """All experts of a layer are one tensor, inputs first, gate and up interleaved."""

    def router_sources(self, experts: MoEConfig, name: str, target: str) -> list[WeightSource]:
        """The router's weight and bias."""
        count, router = experts.router.num_experts, f"{name}.mlp.router"
        shape = (count, self.config.hidden_size)
        return [
            WeightSource(f"{router}.weight", shape, f"{target}.router", shape),
            WeightSource(f"{router}.bias", (count,), f"{target}.router.bias", (count,)),
        ]

    def expert_sources(self, experts: MoEConfig, name: str, target: str) -> list[WeightSource]:
        """Two products and their biases."""
        count, hidden, ffn = experts.router.num_experts, self.config.hidden_size, experts.ffn_size
        block, target = f"{name}.mlp.experts", f"{target}.experts"
        return [
            WeightSource(
                f"{block}.gate_up_proj", (count, hidden, 2 * ffn), f"{target}.gate_up", (count, 2, ffn, hidden),
                split=(count, hidden, ffn, 2), axes=(0, 3, 2, 1),
            ),
            WeightSource(
                f"{block}.gate_up_proj_bias", (count, 2 * ffn), f"{target}.gate_up_bias", (count, 2, ffn),
                split=(count, ffn, 2), axes=(0, 2, 1),
            ),
            WeightSource(
                f"{block}.down_proj", (count, ffn, hidden), f"{target}.down", (count, hidden, ffn),
                axes=(0, 2, 1),
            ),
            WeightSource(
                f"{block}.down_proj_bias", (count, hidden), f"{target}.down_bias", (count, hidden)
            ),
        ]  # fmt: skip


def create(config: Mapping[str, Any], context: LayerContext) -> GptOssCausalLM:
    """Layers have the window in turns, the first included, unless ``layer_types`` says otherwise."""
    num_layers, experts = positive(config, "num_hidden_layers"), num_experts(config)
    types = config.get("layer_types") or [
        "full_attention" if layer % 2 else "sliding_attention" for layer in range(num_layers)
    ]
    bias = bool(config.get("attention_bias", True))
    decoder = decoder_config(
        config,
        sliding_windows=layerwise_windows({**config, "layer_types": types, "use_sliding_window": True}),
        qkv_bias=bias,
        out_bias=bias,
        head_size=64,
    )
    router = RouterConfig(experts, top_k_of(config, experts), "softmax_of_chosen", bias=True)
    clamped = ClampedSwiGLU(
        float(config.get("swiglu_alpha") or 1.702), float(config.get("swiglu_limit") or 7.0)
    )
    moe = MoEConfig(router, decoder.ffn_size, bias=True, clamped=clamped)
    return GptOssCausalLM(replace(decoder, sinks=True, experts=(moe,) * num_layers), context)
