"""Qwen3-MoE: Qwen3's decoder with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.layers.moe import MoEConfig
from jaxserve.layers.params import LayerContext
from jaxserve.models.dense import decoder_config, positive
from jaxserve.models.experts import ExpertsCausalLM, softmax_router, sparse_layers

ARCHITECTURES = ("Qwen3MoeForCausalLM",)


def create(config: Mapping[str, Any], context: LayerContext) -> ExpertsCausalLM:
    """With ``use_sliding_window`` every layer has the window; ``attention_bias`` covers all four products."""
    attention_bias = bool(config.get("attention_bias", False))
    window = positive(config, "sliding_window") if config.get("use_sliding_window", False) else None
    decoder = decoder_config(
        config,
        sliding_windows=(window,) * positive(config, "num_hidden_layers"),
        qkv_bias=attention_bias,
        out_bias=attention_bias,
        qk_norm=True,
    )
    experts = MoEConfig(softmax_router(config), positive(config, "moe_intermediate_size"))
    return ExpertsCausalLM(replace(decoder, experts=sparse_layers(config, experts)), context)
