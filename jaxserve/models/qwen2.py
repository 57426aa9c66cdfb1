"""Qwen2 and Qwen2.5: Llama's decoder with biases on q, k and v."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.layers.params import LayerContext
from jaxserve.models.dense import DenseCausalLM, decoder_config, layerwise_windows

ARCHITECTURES = ("Qwen2ForCausalLM",)


def create(config: Mapping[str, Any], context: LayerContext) -> DenseCausalLM:
    """With ``use_sliding_window``, windows are layer-wise."""
    return DenseCausalLM(
        decoder_config(config, sliding_windows=layerwise_windows(config), qkv_bias=True), context
    )
