"""Llama (1 to 3.3) and what copies its architecture: SmolLM2, Yi, DeepSeek LLM, …"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.layers.params import LayerContext
from jaxserve.models.dense import DenseCausalLM, decoder_config

ARCHITECTURES = ("LlamaForCausalLM",)


def create(config: Mapping[str, Any], context: LayerContext) -> DenseCausalLM:
    """``attention_bias`` is on all four products of attention, ``mlp_bias`` on all three of the MLP."""
    attention_bias = bool(config.get("attention_bias", False))
    return DenseCausalLM(
        decoder_config(
            config,
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
        ),
        context,
    )
