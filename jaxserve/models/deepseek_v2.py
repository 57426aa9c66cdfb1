"""DeepSeek-V2 and V2-Lite: latent attention, and experts beside shared ones in all layers but the first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from jaxserve.errors import UnsupportedModelError
from jaxserve.layers.decoder import DecoderConfig
from jaxserve.layers.mla import MLAConfig
from jaxserve.layers.moe import MoEConfig
from jaxserve.layers.params import LayerContext
from jaxserve.layers.rope import RopeConfig
from jaxserve.layers.router import RouterConfig
from jaxserve.models.dense import decoder_config, positive
from jaxserve.models.experts import ExpertNames, ExpertsCausalLM, top_k_of
from jaxserve.weights.weight_map import WeightSource

ARCHITECTURES = ("DeepseekV2ForCausalLM",)
TOPK_METHODS = ("greedy", "group_limited_greedy", "noaux_tc")
SCORINGS: tuple[Literal["softmax"], Literal["sigmoid"]] = ("softmax", "sigmoid")


class DeepseekCausalLM(ExpertsCausalLM):
    """The shared decoder with latent attention. Tensors of layers past the last, which predict further tokens, are
    left out."""

    names = ExpertNames(shared="shared_experts")

    def attention_sources(self, name: str, target: str) -> list[WeightSource]:
        """A layer's products down to latents, up from them, and out; the norms of latents."""
        mla, hidden, heads = self.config.mla, self.config.hidden_size, self.config.num_heads
        assert mla is not None
        queries, inputs = heads * mla.query_size, heads * mla.value_size
        shapes: dict[str, tuple[str, tuple[int, ...]]] = {
            "kv_a_proj_with_mqa.weight": ("kv_down", (mla.latent_size, hidden)),
            "kv_a_layernorm.weight": ("kv_norm", (mla.rank,)),
            "kv_b_proj.weight": ("kv_up", (heads * (mla.nope_size + mla.value_size), mla.rank)),
            "o_proj.weight": ("out", (hidden, inputs)),
        }
        if mla.query_rank is None:
            shapes["q_proj.weight"] = ("q", (queries, hidden))
        else:
            shapes |= {
                "q_a_proj.weight": ("q_down", (mla.query_rank, hidden)),
                "q_a_layernorm.weight": ("q_norm", (mla.query_rank,)),
                "q_b_proj.weight": ("q", (queries, mla.query_rank)),
            }
        if mla.bias:
            shapes |= {
                "kv_a_proj_with_mqa.bias": ("kv_down_bias", (mla.latent_size,)),
                "o_proj.bias": ("out_bias", (hidden,)),
            }
            if mla.query_rank is not None:
                shapes["q_a_proj.bias"] = ("q_down_bias", (mla.query_rank,))
        return [
            WeightSource(f"{name}.{part}", shape, f"{target}.{parameter}", shape)
            for part, (parameter, shape) in shapes.items()
        ]


def create(config: Mapping[str, Any], context: LayerContext) -> DeepseekCausalLM:
    """Without ``topk_method`` the experts with the best scores are chosen; with ``norm_topk_prob`` their weights add up
    to 1 and are not scaled."""
    router = router_config(config, "greedy", "softmax")
    if router is not None and router.renormalize:
        router = replace(router, scale=1.0)
    return DeepseekCausalLM(latent_decoder(config, router), context)


def latent_decoder(
    config: Mapping[str, Any], router: RouterConfig | None, *, interleaved: bool = True
) -> DecoderConfig:
    """A decoder with latent attention.

    Args:
        config: config.json.
        router: of the layers with experts; None: there are no experts.
        interleaved: as ``MLAConfig`` has it.

    Raises:
        UnsupportedModelError: a key that is missing, malformed, or asks for something not implemented.
    """
    if config.get("mlp_bias"):
        raise UnsupportedModelError("config.json's mlp_bias is not supported for DeepSeek models.")
    mla = MLAConfig(
        rank=positive(config, "kv_lora_rank"),
        rope_size=positive(config, "qk_rope_head_dim"),
        nope_size=positive(config, "qk_nope_head_dim"),
        value_size=positive(config, "v_head_dim"),
        query_rank=None if config.get("q_lora_rank") is None else positive(config, "q_lora_rank"),
        bias=bool(config.get("attention_bias", False)),
        interleaved=interleaved,
    )
    # Keys and values of heads are not stored, whatever number of them the config gives.
    decoder = decoder_config({**config, "num_key_value_heads": None, "head_dim": mla.latent_size})
    return replace(
        decoder,
        num_kv_heads=1,
        mla=mla,
        attention_scale=mla.query_size**-0.5 * attention_magnitude(decoder.rope) ** 2,
        experts=() if router is None else layers_with_experts(config, router),
    )


def attention_magnitude(rope: RopeConfig) -> float:
    """YaRN's factor on queries and on keys, where ``mscale_all_dim`` asks for one on all of their elements."""
    weight = rope.scaling.get("mscale_all_dim")
    if rope.rope_type == "default" or not weight:
        return 1.0
    factor = rope.number("factor")
    return 0.1 * float(weight) * math.log(factor) + 1.0 if factor > 1 else 1.0


def layers_with_experts(config: Mapping[str, Any], router: RouterConfig) -> tuple[MoEConfig | None, ...]:
    """From layer ``first_k_dense_replace`` on, every one whose number ``moe_layer_freq`` divides."""
    ffn, every = positive(config, "moe_intermediate_size"), positive(config, "moe_layer_freq", 1)
    first, shared = config.get("first_k_dense_replace") or 0, config.get("n_shared_experts")
    experts = MoEConfig(
        router, ffn, shared_ffn_size=None if not shared else ffn * positive(config, "n_shared_experts")
    )
    return tuple(
        experts if layer >= first and layer % every == 0 else None
        for layer in range(positive(config, "num_hidden_layers"))
    )


def router_config(config: Mapping[str, Any], method: str, scoring: str) -> RouterConfig | None:
    """The router that a config describes, or None without experts.

    Args:
        config: config.json.
        method, scoring: the family's ``topk_method`` and ``scoring_func``, where the config has none.

    Raises:
        UnsupportedModelError: a rule that is not implemented, or numbers that do not fit together.
    """
    if config.get("n_routed_experts") is None:
        return None
    experts = positive(config, "n_routed_experts")
    method, scoring = config.get("topk_method") or method, config.get("scoring_func") or scoring
    if method not in TOPK_METHODS:
        raise UnsupportedModelError(
            f"topk_method {method!r} is not supported; supported are {', '.join(TOPK_METHODS)}."
        )
    known = next((each for each in SCORINGS if each == scoring), None)
    if known is None:
        raise UnsupportedModelError(
            f"scoring_func {scoring!r} is not supported; supported are {', '.join(SCORINGS)}."
        )
    groups = 1 if method == "greedy" else positive(config, "n_group", 1)
    factor = config.get("routed_scaling_factor")
    try:
        return RouterConfig(
            experts,
            top_k_of(config, experts),
            known,
            renormalize=bool(config.get("norm_topk_prob")),
            scale=1.0 if factor is None else float(factor),
            num_groups=groups,
            top_groups=1 if method == "greedy" else positive(config, "topk_group", groups),
            group_score="best_two" if method == "noaux_tc" else "best",
            correction_bias=method == "noaux_tc",
        )
    except ValueError as error:
        raise UnsupportedModelError(f"config.json's experts: {error}.") from error
