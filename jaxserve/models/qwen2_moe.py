"""Qwen2-MoE and Qwen1.5-MoE: Qwen2's decoder with experts, one of which sees every token behind a gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.layers.moe import MoEConfig
from jaxserve.layers.params import LayerContext
from jaxserve.models.dense import decoder_config, layerwise_windows, positive
from jaxserve.models.experts import ExpertsCausalLM, softmax_router, sparse_layers

ARCHITECTURES = ("Qwen2MoeForCausalLM",)


def create(config: Mapping[str, Any], context: LayerContext) -> ExpertsCausalLM:
    """With ``use_sliding_window``, every other layer below ``max_window_layers`` has a window, the first included,
    unless ``layer_types`` says otherwise."""
    num_layers = positive(config, "num_hidden_layers")
    first_full = config.get("max_window_layers", 28)
    windowed = [i % 2 == 0 and i < first_full for i in range(num_layers)]
    types = config.get("layer_types") or [
        "sliding_attention" if each else "full_attention" for each in windowed
    ]
    windows = layerwise_windows({**config, "layer_types": types})
    experts = MoEConfig(
        softmax_router(config),
        positive(config, "moe_intermediate_size"),
        shared_ffn_size=positive(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
    decoder = decoder_config(config, sliding_windows=windows, qkv_bias=bool(config.get("qkv_bias", True)))
    return ExpertsCausalLM(replace(decoder, experts=sparse_layers(config, experts)), context)
