"""Qwen3 (dense): each query and key head is normalised before its rotation; no biases by default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.layers.params import LayerContext
from jaxserve.models.dense import DenseCausalLM, decoder_config, layerwise_windows

ARCHITECTURES = ("Qwen3ForCausalLM",)


def create(config: Mapping[str, Any], context: LayerContext) -> DenseCausalLM:
    """The head size is 128 unless the config says otherwise; ``attention_bias`` covers all four products."""
    attention_bias = bool(config.get("attention_bias", False))
    return DenseCausalLM(
        decoder_config(
            config,
            sliding_windows=layerwise_windows(config),
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            qk_norm=True,
            head_size=128,
        ),
        context,
    )
