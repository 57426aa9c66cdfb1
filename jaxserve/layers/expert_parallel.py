"""Expert parallelism: whole experts, spread over all devices, and how tokens of other data-parallel ranks reach them.

The devices of a tensor-parallel group hold the same tokens, so within it nothing has to travel: each device runs its
experts, and the sum that follows every feed-forward adds up their parts. Over the data-parallel ranks tokens travel.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.errors import ConfigError
from jaxserve.layers.params import DATA_AXIS, LayerContext

RunExperts = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(x [T, M], weights [T, k], experts [T, k] of the whole model) to what this device's experts add, [T, M]."""


def experts_here(num_experts: int, context: LayerContext) -> int:
    """Experts a device holds.

    Raises:
        ConfigError: when they cannot be spread evenly, with the numbers of devices that they can.
    """
    if not context.expert_parallel:
        return num_experts
    devices = context.data_parallel_size * context.tensor_parallel_size
    if num_experts % devices:
        fitting = [str(n) for n in range(1, num_experts + 1) if num_experts % n == 0]
        raise ConfigError(
            f"enable_expert_parallel: {num_experts} experts cannot be spread evenly over {devices} devices "
            f"(data_parallel_size {context.data_parallel_size} x tensor_parallel_size "
            f"{context.tensor_parallel_size}); numbers of devices that work: {', '.join(fitting)}.",
            param="enable_expert_parallel",
        )
    return num_experts // devices


def local_experts(experts: jax.Array, num_experts: int, context: LayerContext) -> jax.Array:
    """Numbers of the whole model as numbers among this device's experts; those of others are out of range."""
    rank = jnp.int32(0) if context.data_parallel_size == 1 else lax.axis_index(DATA_AXIS)
    device = rank * context.tensor_parallel_size + context.shard_index()
    return experts - device * experts_here(num_experts, context)


def over_data(
    run: RunExperts, x: jax.Array, weights: jax.Array, experts: jax.Array, top_k: int, context: LayerContext
) -> jax.Array:
    """Run experts on the tokens of all data-parallel ranks; each rank gets the sums for its own, [T, M].

    All tokens are gathered, and the results scattered: (ranks - 1) x T x M elements a device each way. Sending a token
    only where its experts are saves little of that unless ranks outnumber the experts of a token: of 8 ranks a token
    with 8 experts needs 5.2 on average.

    Args:
        run: this device's experts.
        x, weights, experts: [T, M], [T, k] and [T, k] of this rank; an expert that does not exist takes no token.
        top_k: k.
        context: the mesh.
    """
    if context.data_parallel_size == 1:
        return run(x, weights, experts)
    x, weights, experts = (lax.all_gather(each, DATA_AXIS, tiled=True) for each in (x, weights, experts))
    return lax.psum_scatter(run(x, weights, experts), DATA_AXIS, scatter_dimension=0, tiled=True)
