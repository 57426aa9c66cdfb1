"""The router: which experts see a token, and with what weights. One configuration for all families' rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.layers.linear import contract
from jaxserve.layers.params import LayerContext, value_of
from pallas_kernels.grouped_matmul.few import SMALLEST_SUM, Rule


@dataclass(frozen=True)
class RouterConfig:
    """A rule from scores to experts.

    Args:
        num_experts: E.
        top_k: experts a token.
        scoring: scores are a softmax over all experts (Qwen; Mixtral's, renormalised, equal the next), a softmax over
            the chosen ones (gpt-oss), or sigmoids (DeepSeek-V3).
        renormalize: the chosen experts' weights add up to 1.
        scale: multiplies the weights, last.
        num_groups: groups of neighbouring experts; only the experts of the best ``top_groups`` are candidates
            (DeepSeek-AI, 2024). 1: no groups.
        top_groups: groups kept.
        group_score: a group is as good as its best expert (DeepSeek-V2), or as the sum of its best two (V3).
        bias: the product has a bias (gpt-oss).
        correction_bias: a bias that changes which experts are chosen, not their weights (DeepSeek-V3).
    """

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "softmax_of_chosen", "sigmoid"] = "softmax"
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: Literal["best", "best_two"] = "best_two"
    bias: bool = False
    correction_bias: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(f"a token cannot go to {self.top_k} of {self.num_experts} experts")
        if self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"{self.num_experts} experts are not {self.num_groups} groups, of which {self.top_groups} are kept"
            )
        if self.top_k > self.num_experts // self.num_groups * self.top_groups:
            raise ValueError(
                f"{self.top_groups} of {self.num_groups} groups have fewer than {self.top_k} experts"
            )

    def plain(self) -> Rule | None:
        """The rule, where the best logits are all that it takes."""
        if self.num_groups > 1 or self.correction_bias:
            return None
        # A softmax over the chosen is one over all, renormalised.
        renormalize = self.renormalize or self.scoring == "softmax_of_chosen"
        return Rule(self.top_k, self.scoring == "sigmoid", renormalize, self.scale)


def choose_experts(
    logits: jax.Array, config: RouterConfig, correction: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Experts and weights of each token.

    Args:
        logits: float32 [T, E].
        config: the rule.
        correction: float32 [E].

    Returns:
        (float32 [T, k] weights, int32 [T, k] experts), the best first. Of equal scores the lower expert wins.
    """
    if config.scoring == "softmax_of_chosen":
        chosen, experts = jax.lax.top_k(logits, config.top_k)
        return jax.nn.softmax(chosen, axis=-1) * config.scale, experts
    scores = jax.nn.sigmoid(logits) if config.scoring == "sigmoid" else jax.nn.softmax(logits, axis=-1)
    rank_by = scores if correction is None else scores + correction
    if config.num_groups > 1:
        rank_by = jnp.where(_in_best_groups(rank_by, config), rank_by, -jnp.inf)
    _, experts = jax.lax.top_k(rank_by, config.top_k)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + SMALLEST_SUM)
    return weights * config.scale, experts


def _in_best_groups(scores: jax.Array, config: RouterConfig) -> jax.Array:
    """bool [T, E]: the expert's group is one of the best."""
    size = config.num_experts // config.num_groups
    groups = scores.reshape(-1, config.num_groups, size)
    best, _ = jax.lax.top_k(groups, min(2, size) if config.group_score == "best_two" else 1)
    _, kept = jax.lax.top_k(jnp.sum(best, axis=-1), config.top_groups)
    is_kept = jnp.any(kept[:, :, None] == jnp.arange(config.num_groups), axis=1)
    return jnp.repeat(is_kept, size, axis=1)


class Router(nnx.Module):
    """Weights [E, M], whole on every device."""

    def __init__(self, hidden_size: int, config: RouterConfig, context: LayerContext) -> None:
        experts, single = config.num_experts, np.dtype(np.float32)
        self.weight = context.param((experts, hidden_size), (None, "embed"))
        self.bias = context.param((experts,), (None,), scale=0.0) if config.bias else None
        correction = context.param((experts,), (None,), scale=0.0, dtype=single)
        self.correction = correction if config.correction_bias else None
        self.config = config
        self.context = context

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of tokens [T, M]: (float32 [T, k] weights, int32 [T, k] experts)."""
        return choose_experts(self.logits(x), self.config, value_of(self.correction))

    def logits(self, x: jax.Array) -> jax.Array:
        """Of tokens [T, M]: float32 [T, E]."""
        logits = contract(x, self.weight[...], weight_first=self.context.weight_first)
        return logits if self.bias is None else logits + self.bias[...].astype(jnp.float32)
