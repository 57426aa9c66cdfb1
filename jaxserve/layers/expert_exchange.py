"""Sending tokens only to the devices that hold their experts, and the results back: a ragged all-to-all each way.

Between the devices of equal place in their tensor-parallel groups: device m of rank s sends a token to device m of rank
d where that one holds an expert of the token. A device holds a place for every token of every rank, since all of them
may come to it: none is dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.layers.params import DATA_AXIS

RunExperts = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(x [T, M], weights [T, k], experts [T, k] of the whole model) to what this device's experts add, [T, M]."""

ENOUGH_BYTES = 1 << 20
"""Less that need not travel is not worth the two exchanges more that begin one after the other."""


def sending_pays(num_tokens: int, token_bytes: int, top_k: int, num_ranks: int, num_devices: int) -> bool:
    """Whether to send tokens to their experts rather than to gather all of them everywhere.

    Gathering brings each device all tokens of the other ranks, and its results back to them. Of these a device with
    1 / N of the experts needs, if a token's k experts are drawn at random, the share 1 - (1 - 1 / N)^k: of 128 experts
    on 8 devices, 8 a token, 66 %; on 32 devices 22 %. It pays from half of them on, where that is much.
    """
    share = 1 - (1 - 1 / num_devices) ** top_k
    saved = 2 * (1 - share) * (num_ranks - 1) * num_tokens * token_bytes
    return share <= 0.5 and saved >= ENOUGH_BYTES


def send_to_experts(
    run: RunExperts,
    x: jax.Array,
    weights: jax.Array,
    experts: jax.Array,
    device_of: Callable[[jax.Array], jax.Array],
    devices: jax.Array,
) -> jax.Array:
    """What all ranks' experts that share this device's place add to this rank's tokens, [T, M].

    Args:
        run: this device's experts.
        x: [T, M] of this rank.
        weights: float32 [T, k].
        experts: int32 [T, k].
        device_of: the device of each expert; one that does not exist for an expert that does not.
        devices: int32 [ranks], the devices of this place.
    """
    num_ranks, (num_tokens, top_k) = devices.shape[0], experts.shape
    me = lax.axis_index(DATA_AXIS)
    # Everybody knows all choices (a few bytes a token), hence who sends how much to whom.
    all_experts = lax.all_gather(experts, DATA_AXIS)
    all_weights = lax.all_gather(weights, DATA_AXIS)
    meets = jnp.any(device_of(all_experts)[:, None] == devices[None, :, None, None], axis=-1)  # [from, to, T]
    sizes = jnp.sum(meets, axis=-1, dtype=jnp.int32)  # [from, to]
    starts = jnp.cumsum(sizes, axis=1) - sizes  # where in a sender's rows those for each rank begin

    # To the experts: my rows by rank, each rank's in the order of the tokens; there, those of each rank from its place.
    room = num_tokens * min(top_k, num_ranks)
    outgoing = jnp.nonzero(meets[me].reshape(-1), size=room, fill_value=0)[0] % num_tokens
    places = jnp.arange(num_ranks, dtype=jnp.int32) * num_tokens
    received = exchange(
        x[outgoing],
        num_ranks * num_tokens,
        starts[me],
        sizes[me],
        jnp.full(num_ranks, me * num_tokens),
        sizes[:, me],
    )
    whose = jax.vmap(lambda sent: jnp.nonzero(sent, size=num_tokens, fill_value=num_tokens)[0])(meets[:, me])
    rank = jnp.arange(num_ranks)[:, None]
    row_experts = all_experts.at[rank, whose].get(mode="fill", fill_value=-1).reshape(-1, top_k)
    row_weights = all_weights.at[rank, whose].get(mode="fill", fill_value=0).reshape(-1, top_k)
    results = run(received, row_weights, row_experts)

    # And back, into the rows that they came from.
    returned = exchange(results, room, places, sizes[:, me], starts[:, me], sizes[me])
    return _add_up(returned, device_of(experts), meets[me], starts[me], devices)


def _add_up(
    returned: jax.Array, choices: jax.Array, sent: jax.Array, starts: jax.Array, devices: jax.Array
) -> jax.Array:
    """[T, M]: each token's rows, in the order of its choices, one for each rank that it went to.

    Args:
        returned: [rows, M].
        choices: int32 [T, k] device of each chosen expert.
        sent: bool [ranks, T].
        starts: int32 [ranks], where each rank's rows begin.
        devices: int32 [ranks].
    """
    place = starts[:, None] + jnp.cumsum(sent, axis=1) - 1  # [ranks, T]
    is_rank = choices[:, :, None] == devices  # [T, k, ranks]
    earlier = jnp.cumsum(is_rank, axis=1) - is_rank > 0
    first = is_rank & ~earlier  # of several experts on one device the first stands for all
    rows = jnp.sum(jnp.where(first, place.T[:, None, :], 0), axis=-1)
    parts = returned[rows].astype(jnp.float32)
    counts = jnp.any(first, axis=-1)[:, :, None]
    return jnp.sum(jnp.where(counts, parts, 0.0), axis=1).astype(returned.dtype)


def exchange(
    rows: jax.Array,
    num_rows: int,
    input_offsets: jax.Array,
    send_sizes: jax.Array,
    output_offsets: jax.Array,
    recv_sizes: jax.Array,
) -> jax.Array:
    """``jax.lax.ragged_all_to_all`` over the ranks, into zeros [num_rows, M]. XLA has it for TPUs and GPUs."""
    out = jnp.zeros((num_rows, rows.shape[1]), rows.dtype)
    return lax.ragged_all_to_all(
        rows, out, input_offsets, send_sizes, output_offsets, recv_sizes, axis_name=DATA_AXIS
    )
