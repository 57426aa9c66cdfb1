"""Mistral: Llama's decoder with a sliding window over every layer, and a head size of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.errors import UnsupportedModelError
from jaxserve.layers.params import LayerContext
from jaxserve.models.dense import DenseCausalLM, decoder_config, positive

ARCHITECTURES = ("MistralForCausalLM",)


def create(config: Mapping[str, Any], context: LayerContext) -> DenseCausalLM:
    """``sliding_window`` null means full attention; absent, it is Mistral 7B v0.1's 4096."""
    if config.get("layer_types"):
        raise UnsupportedModelError("MistralForCausalLM with layer_types (mixed windows) is not supported.")
    window = config.get("sliding_window", 4096)
    window = None if window is None else positive(config, "sliding_window", window)
    windows = (window,) * positive(config, "num_hidden_layers")
    return DenseCausalLM(decoder_config(config, sliding_windows=windows), context)
