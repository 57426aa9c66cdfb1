"""What the families with experts share: where the tensors of routers and experts go, and which layers have some."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import UnsupportedModelError
from jaxserve.layers.moe import MoEConfig
from jaxserve.layers.router import RouterConfig
from jaxserve.models.dense import DenseCausalLM, dense_sources, mlp_sources, positive
from jaxserve.weights.weight_map import TensorPart, WeightSource


@dataclass(frozen=True)
class ExpertNames:
    """What a family calls the tensors of a layer's experts, below ``model.layers.N.``.

    Args:
        block: the feed-forward.
        gate, up, down: an expert's products.
        shared: the expert that sees every token, below ``block``.
    """

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_expert"


COMMON = ExpertNames()


class ExpertsCausalLM(DenseCausalLM):
    """The shared decoder, with experts in some or all layers."""

    names = COMMON

    def feed_forward_sources(self, layer: int, name: str, target: str) -> list[WeightSource]:
        """The tensors of a layer's router and experts, or of its one feed-forward."""
        experts = self.config.experts_of(layer)
        if experts is None:
            return dense_sources(self.config, name, target)
        return self.router_sources(experts, name, f"{target}.mlp") + self.expert_sources(
            experts, name, f"{target}.mlp"
        )

    def router_sources(self, experts: MoEConfig, name: str, target: str) -> list[WeightSource]:
        """The router's, and what sees every token."""
        hidden, block = self.config.hidden_size, f"{name}.{self.names.block}"
        shape, num_experts = (experts.router.num_experts, hidden), experts.router.num_experts
        sources = [
            WeightSource(f"{block}.gate.weight", shape, f"{target}.router", shape,
                         aliases=(f"{name}.{COMMON.block}.gate.weight",))
        ]  # fmt: skip
        if experts.router.correction_bias:
            bias = f"{block}.gate.e_score_correction_bias"
            sources.append(WeightSource(bias, (num_experts,), f"{target}.router.correction", (num_experts,)))
        shared = f"{block}.{self.names.shared}"
        if experts.shared_ffn_size is not None:
            sources += mlp_sources(hidden, experts.shared_ffn_size, shared, f"{target}.shared")
        if experts.shared_gate:
            gate = (1, hidden)
            sources.append(WeightSource(f"{shared}_gate.weight", gate, f"{target}.shared_gate", gate))
        return sources

    def expert_sources(self, experts: MoEConfig, name: str, target: str) -> list[WeightSource]:
        """Each expert's three tensors, one by one or (as transformers holds them) as parts of all experts' in one."""
        hidden, ffn, num_experts = self.config.hidden_size, experts.ffn_size, experts.router.num_experts
        block, common, names = (
            f"{name}.{self.names.block}.experts",
            f"{name}.{COMMON.block}.experts",
            self.names,
        )
        gate_up, down = (num_experts, 2, ffn, hidden), (num_experts, hidden, ffn)
        sources: list[WeightSource] = []
        for expert in range(num_experts):
            for half, (own, other) in enumerate(((names.gate, COMMON.gate), (names.up, COMMON.up))):
                rows = (expert, slice(half * ffn, (half + 1) * ffn))
                sources.append(WeightSource(
                    f"{block}.{expert}.{own}.weight", (ffn, hidden), f"{target}.experts.gate_up", gate_up,
                    (expert, half),
                    aliases=(f"{common}.{expert}.{other}.weight",),
                    within=TensorPart(f"{common}.gate_up_proj", (num_experts, 2 * ffn, hidden), rows),
                ))  # fmt: skip
            sources.append(WeightSource(
                f"{block}.{expert}.{names.down}.weight", (hidden, ffn), f"{target}.experts.down", down, (expert,),
                aliases=(f"{common}.{expert}.{COMMON.down}.weight",),
                within=TensorPart(f"{common}.down_proj", down, (expert,)),
            ))  # fmt: skip
        return sources


def num_experts(config: Mapping[str, Any]) -> int:
    """E, by either of its names."""
    return positive(config, "num_local_experts" if config.get("num_experts") is None else "num_experts")


def top_k_of(config: Mapping[str, Any], experts: int) -> int:
    """Experts a token.

    Raises:
        UnsupportedModelError: when there are fewer.
    """
    top_k = positive(config, "num_experts_per_tok")
    if top_k > experts:
        raise UnsupportedModelError(
            f"config.json's num_experts_per_tok is {top_k}, but there are {experts} experts."
        )
    return top_k


def softmax_router(config: Mapping[str, Any]) -> RouterConfig:
    """Qwen's: weights add up to 1 where ``norm_topk_prob`` says so."""
    experts = num_experts(config)
    return RouterConfig(
        experts, top_k_of(config, experts), renormalize=bool(config.get("norm_topk_prob", False))
    )


def sparse_layers(config: Mapping[str, Any], experts: MoEConfig) -> tuple[MoEConfig | None, ...]:
    """Qwen's choice of the layers that have experts: every ``decoder_sparse_step``-th, but ``mlp_only_layers``."""
    step, dense = positive(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return tuple(
        experts if layer not in dense and (layer + 1) % step == 0 else None
        for layer in range(positive(config, "num_hidden_layers"))
    )
