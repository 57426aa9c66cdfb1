"""top-k and top-p as one threshold a row, found by counting instead of sorting.

Central idea: each filter keeps the tokens whose weight is at least some threshold. For top-k that is the
largest t with count(weight >= t) >= k, for top-p the largest t with sum(weight where weight >= t) >= p
* total. Both are "the largest t whose tail measures at least a target", searched over integers: each
pass over the row measures the tails of 16 candidates and keeps a sixteenth of the interval, until one
token is isolated. Sums are of integers (``fixed_point.py``), so the result is exact for these weights
and independent of the rest of the batch. Tokens equal to the threshold are all kept. top-p filters what
top-k left.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling.fixed_point import sums

PIVOTS = 16
"""Candidates measured in one pass. The first is the interval's lower end: its tail measures the whole."""

TOP_K, TOP_P, DONE = 0, 1, 2


class Search(NamedTuple):
    """The search of each row, int32[R] all: the threshold is in [low, high)."""

    stage: jax.Array
    low: jax.Array
    high: jax.Array
    high_tail: jax.Array
    """Measure of the tail from ``high`` on; below the target."""
    target: jax.Array
    """0 until the first pass of a stage has measured the whole."""


def find_threshold(
    weights: jax.Array, largest: jax.Array, top_k: jax.Array, top_p: jax.Array, active: jax.Array
) -> jax.Array:
    """The smallest weight that top-k and then top-p keep, at least 1.

    Args:
        weights: int32[R, V] >= 0; a row's sum is below 2**31.
        largest: int32[R], each row's largest weight.
        top_k: int32[R]; 0 is off.
        top_p: float32[R]; 1 is off.
        active: bool[R]; the threshold of other rows is 1.

    Returns:
        int32[R].
    """
    start = start_search(largest + 1, top_k, top_p, active)

    def unfinished(packed: jax.Array) -> jax.Array:
        return jnp.any(packed[0] != DONE)

    def body(packed: jax.Array) -> jax.Array:
        return jnp.stack(advance(Search(*packed), start, weights, top_k, top_p))

    # Carried as one array: a few small programs a pass instead of one for every field.
    return lax.while_loop(unfinished, body, jnp.stack(start))[1]


def start_search(high: jax.Array, top_k: jax.Array, top_p: jax.Array, active: jax.Array) -> Search:
    """The search over [1, high)."""
    stage = jnp.where(top_k > 0, TOP_K, jnp.where(top_p < 1, TOP_P, DONE))
    zero = jnp.zeros_like(high)
    return Search(jnp.where(active, stage, DONE), jnp.ones_like(high), high, zero, zero)


def advance(search: Search, start: Search, weights: jax.Array, top_k: jax.Array, top_p: jax.Array) -> Search:
    """One pass over the weights."""
    pivots = lax.optimization_barrier(_pivots(search.low, search.high))  # computed once, not for every token
    tails = _tails(weights, pivots, search.stage == TOP_K)
    wanted = _target(search.stage, tails[:, 0], top_k, top_p)
    target = jnp.where(search.target > 0, search.target, wanted)
    return _next_stage(_narrow(search, pivots, tails, target), start, top_p)


def mass_target(top_p: jax.Array, total: jax.Array) -> jax.Array:
    """The weight that a nucleus must reach: int32, in [1, total] if there is any."""
    mass = (top_p * total.astype(jnp.float32)).astype(jnp.int32)
    return jnp.maximum(jnp.minimum(mass, total), 1)


def _target(stage: jax.Array, total: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    count = jnp.maximum(jnp.minimum(top_k, total), 1)
    return jnp.where(stage == TOP_K, count, mass_target(top_p, total))


def _pivots(low: jax.Array, high: jax.Array) -> jax.Array:
    """int32[R, PIVOTS], from ``low`` up to below ``high``: in equal ratios while far apart, then in
    equal steps.

    Any increasing choice gives the same threshold; this one needs few passes, since weights spread over
    decades.
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


def _tails(weights: jax.Array, pivots: jax.Array, counting: jax.Array) -> jax.Array:
    """int32[R, PIVOTS]: of the weights >= each pivot, their number (``counting`` rows) or their sum."""
    measure = jnp.where(counting[:, None], 1, weights)
    masked = [jnp.where(weights >= pivots[:, index, None], measure, 0) for index in range(PIVOTS)]
    return jnp.stack(sums(*masked), axis=-1)


def _narrow(search: Search, pivots: jax.Array, tails: jax.Array, target: jax.Array) -> Search:
    reached = tails >= target[:, None]
    last = jnp.iinfo(jnp.int32).max
    low, low_tail, high, high_tail = lax.reduce(
        [
            jnp.where(reached, pivots, 0),
            jnp.where(reached, tails, last),
            jnp.where(reached, last, pivots),
            jnp.where(reached, 0, tails),
        ],
        [jnp.int32(0), jnp.int32(last), jnp.int32(last), jnp.int32(0)],
        lambda a, b: [
            jnp.maximum(a[0], b[0]),
            jnp.minimum(a[1], b[1]),
            jnp.minimum(a[2], b[2]),
            jnp.maximum(a[3], b[3]),
        ],
        (1,),
    )
    low, high = jnp.maximum(low, search.low), jnp.minimum(high, search.high)
    high_tail = jnp.maximum(high_tail, search.high_tail)
    # Done when [low, high) holds one token or one integer, or the tail at low is exactly what was asked for.
    inside = low_tail - high_tail
    single = jnp.where(search.stage == TOP_K, inside <= 1, inside // 2 < low)
    done = (high - low <= 1) | single | (low_tail == target)
    active = search.stage != DONE
    return Search(
        stage=jnp.where(active & done, search.stage + 1, search.stage),
        low=jnp.where(active, low, search.low),
        high=jnp.where(active, high, search.high),
        high_tail=jnp.where(active, high_tail, search.high_tail),
        target=jnp.where(active & done, 0, target),
    )


def _next_stage(search: Search, start: Search, top_p: jax.Array) -> Search:
    # top-p starts where top-k ended: among the weights from its threshold on.
    begins = (search.stage == TOP_P) & (search.target == 0)
    return search._replace(
        stage=jnp.where(begins & (top_p >= 1), DONE, search.stage),
        high=jnp.where(begins, start.high, search.high),
        high_tail=jnp.where(begins, 0, search.high_tail),
    )
