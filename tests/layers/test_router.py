"""Routing rules against plain numpy, token by token, and DeepSeek-V3's against transformers where torch is."""

from __future__ import annotations

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.layers.router import RouterConfig, choose_experts

pytestmark = pytest.mark.device
LOGITS = np.random.RandomState(0).standard_normal((40, 12)).astype(np.float32)
CORRECTION = np.random.RandomState(1).standard_normal(12).astype(np.float32) * 0.3


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def expected(logits: np.ndarray, config: RouterConfig) -> dict[int, float]:
    """Expert to weight of one token."""
    if config.scoring == "softmax_of_chosen":
        chosen = np.argsort(-logits)[: config.top_k]
        return dict(zip(chosen.tolist(), softmax(logits[chosen])))
    scores = 1 / (1 + np.exp(-logits)) if config.scoring == "sigmoid" else softmax(logits)
    rank_by = scores + CORRECTION if config.correction_bias else scores
    size = len(logits) // config.num_groups
    best = 1 if config.group_score == "best" else 2
    groups = [np.sort(rank_by[g * size : g * size + size])[-best:].sum() for g in range(config.num_groups)]
    kept = np.argsort(groups)[::-1][: config.top_groups]
    candidates = [e for e in range(len(logits)) if e // size in kept]
    chosen = sorted(candidates, key=lambda e: -rank_by[e])[: config.top_k]
    total = scores[chosen].sum() if config.renormalize else 1.0
    return {e: scores[e] / total * config.scale for e in chosen}


@pytest.mark.parametrize(
    "rule",
    [
        {"top_k": 3},
        {"top_k": 3, "renormalize": True},
        {"top_k": 2, "scoring": "softmax_of_chosen"},
        {"top_k": 12, "scoring": "softmax_of_chosen"},
        {"top_k": 1, "renormalize": True},
        {"top_k": 3, "num_groups": 4, "top_groups": 2, "group_score": "best", "scale": 16.0},
        {"top_k": 4, "scoring": "sigmoid", "num_groups": 4, "top_groups": 2, "renormalize": True, "scale": 2.5,
         "correction_bias": True},
        {"top_k": 2, "scoring": "sigmoid", "correction_bias": True},
    ],
)  # fmt: skip
def test_rules(rule: dict[str, Any]) -> None:
    config = RouterConfig(12, **rule)
    correction = jnp.asarray(CORRECTION) if config.correction_bias else None
    weights, experts = choose_experts(jnp.asarray(LOGITS), config, correction)
    assert (weights.dtype, experts.dtype) == (jnp.float32, jnp.int32)
    for token in range(len(LOGITS)):
        found = dict(zip(np.asarray(experts[token]).tolist(), np.asarray(weights[token])))
        wanted = expected(LOGITS[token], config)
        assert found.keys() == wanted.keys()
        for expert, weight in wanted.items():
            np.testing.assert_allclose(found[expert], weight, rtol=1e-5)


def test_softmax_then_renormalised_is_the_softmax_of_the_chosen() -> None:
    """Mixtral is written the first way and computed the second."""
    first = choose_experts(jnp.asarray(LOGITS), RouterConfig(12, 3, renormalize=True))
    second = choose_experts(jnp.asarray(LOGITS), RouterConfig(12, 3, "softmax_of_chosen"))
    np.testing.assert_array_equal(first[1], second[1])
    np.testing.assert_allclose(first[0], second[0], rtol=1e-5)


def test_a_correction_changes_the_choice_and_no_weight() -> None:
    config = RouterConfig(4, 2, "sigmoid", correction_bias=True)
    logits = jnp.asarray([[0.0, 1.0, 2.0, 3.0]])
    weights, experts = choose_experts(logits, config, jnp.asarray([10.0, 0.0, 0.0, 0.0]))
    np.testing.assert_array_equal(experts, [[0, 3]])
    np.testing.assert_allclose(weights, [[0.5, 1 / (1 + np.exp(-3.0))]], rtol=1e-6)


def test_sigmoids_that_underflow_divide_by_no_zero() -> None:
    config = RouterConfig(4, 2, "sigmoid", renormalize=True)
    weights, _ = choose_experts(jnp.full((1, 4), -200.0), config)
    assert np.isfinite(weights).all()


@pytest.mark.parametrize(
    "rule", [{"top_k": 13}, {"top_k": 0}, {"top_k": 2, "num_groups": 5}, {"top_k": 4, "num_groups": 4},
             {"top_k": 2, "num_groups": 3, "top_groups": 4}],
)  # fmt: skip
def test_rules_that_cannot_be(rule: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="experts"):
        RouterConfig(12, **rule)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
def test_deepseek_v3_equals_transformers() -> None:
    import torch
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    theirs = DeepseekV3TopkRouter(
        DeepseekV3Config(n_routed_experts=12, num_experts_per_tok=4, n_group=4, topk_group=2, hidden_size=12)
    )
    theirs.weight.data = torch.eye(12)
    theirs.e_score_correction_bias.data = torch.tensor(CORRECTION)
    _, wanted, chosen = theirs(torch.tensor(LOGITS))
    config = RouterConfig(
        12, 4, "sigmoid", True, 2.5, num_groups=4, top_groups=2, group_score="best_two", correction_bias=True
    )
    weights, experts = jax.jit(choose_experts, static_argnums=1)(LOGITS, config, CORRECTION)
    for token in range(len(LOGITS)):
        ours = dict(zip(np.asarray(experts[token]).tolist(), np.asarray(weights[token])))
        other = dict(zip(chosen[token].tolist(), wanted[token].tolist()))
        assert ours.keys() == other.keys()
        np.testing.assert_allclose([ours[e] for e in other], list(other.values()), rtol=1e-5)
