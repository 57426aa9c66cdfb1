"""Mixtral: Mistral's decoder with experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxserve.layers.moe import MoEConfig
from jaxserve.layers.params import LayerContext
from jaxserve.layers.router import RouterConfig
from jaxserve.models.dense import decoder_config, positive
from jaxserve.models.experts import ExpertNames, ExpertsCausalLM, num_experts, top_k_of

ARCHITECTURES = ("MixtralForCausalLM",)


class MixtralCausalLM(ExpertsCausalLM):
    """Its checkpoints have names of their own for experts."""

    names = ExpertNames("block_sparse_moe", gate="w1", up="w3", down="w2")


def create(config: Mapping[str, Any], context: LayerContext) -> MixtralCausalLM:
    """The experts' weights are a softmax over the chosen ones. ``sliding_window`` null means full attention."""
    num_layers, experts = positive(config, "num_hidden_layers"), num_experts(config)
    window = None if config.get("sliding_window") is None else positive(config, "sliding_window")
    router = RouterConfig(experts, top_k_of(config, experts), "softmax_of_chosen")
    decoder = decoder_config(config, sliding_windows=(window,) * num_layers)
    moe = MoEConfig(router, decoder.ffn_size)
    return MixtralCausalLM(replace(decoder, experts=(moe,) * num_layers), context)
