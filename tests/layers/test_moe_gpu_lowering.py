"""Qwen3-30B-A3B's experts lower for Hopper with every number of tokens that a step has, and by which kernels."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from gpu_interpreter import needs_mosaic_gpu

from jaxserve.layers.moe import MoE, MoEConfig
from jaxserve.layers.params import LayerContext
from jaxserve.layers.router import RouterConfig
from pallas_kernels.dispatch import BlockedBackend
from pallas_kernels.grouped_matmul.dispatch import WhereItCan

pytestmark = [pytest.mark.device, needs_mosaic_gpu]
CONFIG = Path(__file__).parents[2] / "benchmarks" / "models" / "qwen3-30b-a3b" / "config.json"
KERNELS = ("choose_experts", "experts_gate_up", "experts_down", "route_experts")
FEW, MANY = KERNELS[:3], KERNELS[3:]


@functools.cache
def layer(num_experts: int | None = None) -> Any:
    """(function, weights, hidden size) of the model's layer; with other experts where that is said."""
    from pallas_kernels.grouped_matmul.gpu import GpuGroupedMatmul

    config = json.loads(CONFIG.read_text())
    context = LayerContext(
        np.dtype(jnp.bfloat16), BlockedBackend(), grouped_matmul=WhereItCan(GpuGroupedMatmul(num_sms=132))
    )
    router = RouterConfig(
        num_experts or config["num_experts"], config["num_experts_per_tok"],
        renormalize=config["norm_topk_prob"],
    )  # fmt: skip
    module = MoE(config["hidden_size"], MoEConfig(router, config["moe_intermediate_size"]), context)
    graphdef, state = nnx.split(module)
    leaves, structure = jax.tree.flatten(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    shapes = [leaf.get_metadata()["spec"].shape for leaf in leaves]
    weights = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def run(weights: Any, x: jax.Array, live: jax.Array) -> Any:
        return nnx.merge(graphdef, structure.unflatten(weights))(x, live)

    return run, weights, config["hidden_size"]


def lowered(num_tokens: int, num_experts: int | None = None) -> str:
    run, weights, hidden = layer(num_experts)
    x = jax.ShapeDtypeStruct((num_tokens, hidden), jnp.bfloat16)
    traced = jax.jit(run).trace(weights, x, jax.ShapeDtypeStruct((num_tokens,), bool))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("num_tokens", [1, 8, 16, 32, 64, 128, 256, 512])
def test_the_models_experts_lower(num_tokens: int) -> None:
    text = lowered(num_tokens)
    assert text.count("custom_call @mosaic_gpu_v2") == 3
    assert tuple(name for name in KERNELS if name in text) == (FEW if num_tokens <= 64 else MANY)
    assert "ragged_dot" not in text


@pytest.mark.parametrize("num_tokens", [8, 128])
def test_half_as_many_experts_lower(num_tokens: int) -> None:
    """A vector of 64 is fewer than a warpgroup's threads."""
    assert lowered(num_tokens, 64).count("custom_call @mosaic_gpu_v2") == 3
