"""A large top-k as one threshold a row, found by counting instead of sorting.

Central idea: top-k keeps the tokens whose weight is at least some threshold: the largest t with
count(weight >= t) >= k. It is searched over integers: each pass over the row counts the tails of 16
candidates and keeps a sixteenth of the interval, until one token is isolated. Counts are exact, so the
result depends on the row's weights alone. Tokens equal to the threshold are all kept.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling.fixed_point import sums

PIVOTS = 16
"""Candidates counted in one pass. The first is the interval's lower end."""


class Search(NamedTuple):
    """The search of each row, int32[R] all: the threshold is in [low, high)."""

    low: jax.Array
    high: jax.Array
    high_count: jax.Array
    """Tokens from ``high`` on: fewer than k."""
    unfinished: jax.Array
    """1 or 0."""


def top_k_threshold(weights: jax.Array, largest: jax.Array, top_k: jax.Array, active: jax.Array) -> jax.Array:
    """The smallest weight that top-k keeps, at least 1: int32[R].

    Args:
        weights: int32[R, V] >= 0.
        largest: int32[R], each row's largest weight.
        top_k: int32[R] >= 1.
        active: bool[R]; the threshold of other rows is 1.
    """

    def unfinished(packed: jax.Array) -> jax.Array:
        return jnp.any(packed[3] != 0)

    def body(packed: jax.Array) -> jax.Array:
        return jnp.stack(advance(Search(*packed), weights, top_k))

    # Carried as one array: one small kernel a pass instead of one for every field.
    return lax.while_loop(unfinished, body, jnp.stack(start_search(largest, active)))[0]


def start_search(largest: jax.Array, active: jax.Array) -> Search:
    """The search over [1, largest]."""
    return Search(jnp.ones_like(largest), largest + 1, jnp.zeros_like(largest), active.astype(jnp.int32))


def advance(search: Search, weights: jax.Array, top_k: jax.Array) -> Search:
    """One pass over the weights."""
    pivots = lax.optimization_barrier(_pivots(search.low, search.high))  # computed once, not for every token
    counts = jnp.stack(
        sums(*[(weights >= pivots[:, index, None]).astype(jnp.int32) for index in range(PIVOTS)]), axis=-1
    )
    wanted = jnp.minimum(top_k, counts[:, 0])
    reached = counts >= wanted[:, None]
    last = jnp.iinfo(jnp.int32).max
    low, low_count, high, high_count = lax.reduce(
        [
            jnp.where(reached, pivots, 0),
            jnp.where(reached, counts, last),
            jnp.where(reached, last, pivots),
            jnp.where(reached, 0, counts),
        ],
        [jnp.int32(0), jnp.int32(last), jnp.int32(last), jnp.int32(0)],
        _max_min_min_max,
        (1,),
    )
    low, high = jnp.maximum(low, search.low), jnp.minimum(high, search.high)
    high_count = jnp.maximum(high_count, search.high_count)
    # Done when [low, high) holds one token or one integer, or exactly k tokens are counted from low on.
    done = (high - low <= 1) | (low_count - high_count <= 1) | (low_count == wanted)
    active = search.unfinished != 0
    return Search(
        low=jnp.where(active, low, search.low),
        high=jnp.where(active, high, search.high),
        high_count=jnp.where(active, high_count, search.high_count),
        unfinished=(active & ~done).astype(jnp.int32),
    )


def _max_min_min_max(a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
    combine = (jnp.maximum, jnp.minimum, jnp.minimum, jnp.maximum)
    return [function(x, y) for function, x, y in zip(combine, a, b, strict=True)]


def _pivots(low: jax.Array, high: jax.Array) -> jax.Array:
    """int32[R, PIVOTS] from ``low`` up to below ``high``.

    In equal ratios while far apart, then in equal steps. Any increasing choice gives the same threshold; this
    one needs few passes, since weights spread over decades.
    """
    steps = lax.broadcasted_iota(jnp.int32, (1, PIVOTS), 1)
    span = (high - low)[:, None]
    linear = (span // PIVOTS) * steps + (span % PIVOTS) * steps // PIVOTS
    start = low.astype(jnp.float32)[:, None]
    ratio = jnp.log(high.astype(jnp.float32)[:, None] / start)
    growth = jnp.exp(ratio * (steps.astype(jnp.float32) / PIVOTS)) - 1
    geometric = jnp.minimum(start * growth, 2.0**30).astype(jnp.int32)
    offset = jnp.where(ratio > 1, geometric, linear)
    # At least one step apart where there is room, so that every pass narrows the interval.
    return low[:, None] + jnp.clip(offset, jnp.minimum(steps, span - 1), span - 1)
