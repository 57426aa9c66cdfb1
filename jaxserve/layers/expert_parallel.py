"""Expert parallelism: whole experts, spread over all devices, and how tokens of other data-parallel ranks reach them.

The devices of a tensor-parallel group hold the same tokens, so within it nothing has to travel: each device runs its
experts, and the sum that follows every feed-forward adds up their parts. Over the data-parallel ranks tokens travel.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.errors import ConfigError
from jaxserve.layers.expert_exchange import RunExperts, send_to_experts, sending_pays
from jaxserve.layers.params import DATA_AXIS, LayerContext


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
    run: RunExperts,
    x: jax.Array,
    weights: jax.Array,
    experts: jax.Array,
    num_experts: int,
    context: LayerContext,
) -> jax.Array:
    """Run experts on the tokens of all data-parallel ranks; each rank gets the sums for its own, [T, M].

    Either all tokens are gathered, and the results scattered: (ranks - 1) x T x M elements a device each way. Or tokens
    are sent where their experts are (``expert_exchange``), where that saves enough and the devices can.

    Args:
        run: this device's experts.
        x, weights, experts: [T, M], [T, k] and [T, k] of this rank; an expert that does not exist takes no token.
        num_experts: E.
        context: the mesh.
    """
    ranks, group = context.data_parallel_size, context.tensor_parallel_size
    if ranks == 1:
        return run(x, weights, experts)
    token_bytes = x.shape[1] * x.dtype.itemsize
    if context.ragged_exchange and sending_pays(
        x.shape[0], token_bytes, experts.shape[1], ranks, ranks * group
    ):
        here = experts_here(num_experts, context)
        devices = jnp.arange(ranks, dtype=jnp.int32) * group + context.shard_index()
        return send_to_experts(run, x, weights, experts, lambda chosen: chosen // here, devices)
    x, weights, experts = (lax.all_gather(each, DATA_AXIS, tiled=True) for each in (x, weights, experts))
    return lax.psum_scatter(run(x, weights, experts), DATA_AXIS, scatter_dimension=0, tiled=True)


def expert_imbalance(load: jax.Array, context: LayerContext) -> jax.Array:
    """How unevenly a step used its experts: float32 [1], the mean over layers of the most loaded's share of the mean.

    Under expert parallelism a device's experts count together: its load is what the others wait for. 1 is even; a step
    without tokens is. One token with k of E experts cannot be below E / k.

    Args:
        load: int32 [layers, E] tokens that each expert got of this data-parallel rank.
        context: the mesh.
    """
    if context.data_parallel_size > 1:
        load = lax.psum(load, DATA_AXIS)
    if context.expert_parallel:
        devices = context.data_parallel_size * context.tensor_parallel_size
        load = jnp.sum(load.reshape(load.shape[0], devices, -1), axis=-1)
    mean, most = jnp.mean(load.astype(jnp.float32), axis=-1), jnp.max(load, axis=-1)
    return jnp.mean(jnp.where(mean > 0, most / mean, 1.0))[None]
