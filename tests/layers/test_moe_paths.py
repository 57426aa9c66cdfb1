"""Experts by kernels that choose, or that take few tokens as a whole, equal sorted products; here the oracles do it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_harness import OracleBackend

from jaxserve.layers.moe import MoE, MoEConfig
from jaxserve.layers.params import LayerContext
from jaxserve.layers.router import RouterConfig
from pallas_kernels.grouped_matmul import few, route
from pallas_kernels.grouped_matmul.dispatch import PORTABLE, PortableGroupedMatmul

pytestmark = pytest.mark.device
HIDDEN, EXPERTS, FFN, TOKENS = 16, 8, 12, 128
CONTEXT = LayerContext(np.dtype(np.float32), OracleBackend())


@dataclass(frozen=True)
class Few:
    """``dispatch.FewTokens`` by its oracles."""

    chooses: bool

    def why_not(self, *sizes: Any) -> str | None:
        return None

    def why_not_choose(self, *sizes: Any) -> str | None:
        return None if self.chooses else "others do"

    def routed(self, x: Any, logits: Any, live: Any, rule: Any, gate_up: Any, down: Any) -> Any:
        chosen, load = few.choose(logits, live, rule)
        return few.gated_mlp(x, gate_up, down, chosen), load

    def __call__(self, x: Any, gate_up: Any, down: Any, chosen: Any) -> Any:
        return few.gated_mlp(x, gate_up, down, chosen)


@dataclass(frozen=True)
class Route:
    """``dispatch.Route`` by its oracle."""

    def why_not(self, *sizes: Any) -> str | None:
        return None

    def __call__(self, logits: Any, live: Any, rule: Any) -> Any:
        return route.route(logits, live, rule)


@dataclass(frozen=True)
class Multiply(PortableGroupedMatmul):
    few: Any = None
    route: Any = None


ROUTERS = {
    "softmax": RouterConfig(EXPERTS, 3, scale=0.5),
    "of the chosen": RouterConfig(EXPERTS, 2, "softmax_of_chosen", bias=True),
    "sigmoid": RouterConfig(EXPERTS, 3, "sigmoid", renormalize=True),
}
PATHS = {
    "few": Multiply(few=Few(True)),
    "few, chosen here": Multiply(few=Few(False)),
    "routed": Multiply(route=Route()),
}


def run(config: MoEConfig, multiply: Any) -> tuple[np.ndarray, np.ndarray]:
    layer = MoE(HIDDEN, config, replace(CONTEXT, grouped_matmul=multiply))
    graphdef, state = nnx.split(layer)
    leaves, structure = jax.tree.flatten(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    random = np.random.RandomState(3)
    weights = [0.3 * random.standard_normal(leaf.get_metadata()["spec"].shape) for leaf in leaves]
    weights = [jnp.asarray(each, jnp.float32) for each in weights]
    x = jnp.asarray(random.standard_normal((TOKENS, HIDDEN)), jnp.float32)
    out, load = jax.jit(nnx.merge(graphdef, structure.unflatten(weights)))(x, jnp.arange(TOKENS) % 6 != 4)
    return np.asarray(out), np.asarray(load)


@pytest.mark.parametrize("router", ROUTERS)
def test_all_ways_are_equal(router: str) -> None:
    config = MoEConfig(ROUTERS[router], FFN, bias=ROUTERS[router].bias)
    expected, expected_load = run(config, PORTABLE)
    for name, multiply in PATHS.items():
        out, load = run(config, multiply)
        np.testing.assert_allclose(out, expected, rtol=0, atol=2e-5, err_msg=name)
        np.testing.assert_array_equal(load, expected_load, err_msg=name)


def test_rules_with_groups_or_corrections_are_not_plain() -> None:
    assert RouterConfig(EXPERTS, 2, "sigmoid", num_groups=4, top_groups=2).plain() is None
    assert RouterConfig(EXPERTS, 2, "sigmoid", correction_bias=True).plain() is None
    assert ROUTERS["of the chosen"].plain() == few.Rule(2, renormalize=True)
