"""Expert parallelism compiled by the real TPU compiler, for a slice of 16 chips that nobody owns."""

from __future__ import annotations

import collections
import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from model_harness import OracleBackend

from jaxserve.layers.moe import MoE, MoEConfig
from jaxserve.layers.params import LayerContext
from jaxserve.layers.router import RouterConfig
from jaxserve.runner.placement import Placement
from sharding import DEFAULT_RULES, make_mesh

pytest.importorskip("libtpu", reason="libtpu, the TPU's compiler, is not installed (the tpu extra)")
pytestmark = [pytest.mark.device, pytest.mark.tpu_aot, pytest.mark.timeout(1800)]

HIDDEN, TOKENS, RANKS, GROUP = 1024, 512, 4, 4


def test_tokens_travel_to_their_experts() -> None:
    """Two ragged all-to-alls and the sum of the group; of the gathers only those of choices and weights are left."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    devices = topologies.get_topology_desc(topology_name="v5e:4x4", platform="tpu").devices
    context = LayerContext(
        np.dtype(jnp.bfloat16), OracleBackend(), tensor_parallel_size=GROUP, data_parallel_size=RANKS,
        expert_parallel=True, ragged_exchange=True, rules=DEFAULT_RULES.for_experts(),
    )  # fmt: skip
    layer = MoE(HIDDEN, MoEConfig(RouterConfig(32, 4, renormalize=True), 256), context)
    graphdef, state = nnx.split(layer)
    variables = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
    specs = [variable.get_metadata()["spec"] for variable in variables]
    splits = [context.rules.partition_spec(spec.axes) for spec in specs]
    leaves = jax.tree.structure(state)

    def run(weights: list[jax.Array], x: jax.Array, live: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, leaves.unflatten(weights))(x, live)[0]

    mesh, by_rank = make_mesh(GROUP, list(devices), data_parallel_size=RANKS), PartitionSpec("data")
    weights = [spec.abstract(mesh, context.rules) for spec in specs]
    where = NamedSharding(mesh, by_rank)
    x = jax.ShapeDtypeStruct((RANKS * TOKENS, HIDDEN), jnp.bfloat16, sharding=where)
    live = jax.ShapeDtypeStruct((RANKS * TOKENS,), jnp.bool_, sharding=where)
    program = Placement(mesh).jit(run, (splits, by_rank, by_rank), by_rank)
    text = program.lower(weights, x, live).compile().as_text()
    kinds = r" (all-reduce|all-gather|ragged-all-to-all|reduce-scatter)(?:-start)?\("
    found = collections.Counter(re.findall(kinds, text))
    assert found == {"ragged-all-to-all": 2, "all-gather": 2, "all-reduce": 1}
