"""top-k, top-p and min-p as one threshold a row, found by counting instead of sorting.

Central idea: each filter keeps the tokens whose weight is at least some threshold. For top-k that is the largest t
with count(weight >= t) >= k, for top-p the largest t with sum(weight where weight >= t) >= p * total: both are "the
largest t whose tail measures at least a target", searched over integers. Each pass over the row measures the tails of
16 candidates and keeps one sixteenth of the interval; a handful of passes isolates one token. Sums are of integers
(``fixed_point.py``), so the result is exact for these weights and independent of the rest of the batch. Tokens equal
to the threshold are all kept.

Order: min-p, then top-k among what is left, then top-p among that.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling.fixed_point import add_all, to_weight

PIVOTS = 16
"""Candidates measured in one pass. The first is the lower end, whose tail is the measure of the whole interval."""

_TOP_K, _TOP_P, _DONE = 0, 1, 2


class _Search(NamedTuple):
    """One row's search, each an int32[R]: the threshold is in [low, high)."""

    stage: jax.Array
    low: jax.Array
    high: jax.Array
    high_tail: jax.Array
    """Measure of the tail at ``high``; below the target."""
    target: jax.Array
    """0 until the first pass of a stage has measured the whole."""


def find_threshold(
    values: jax.Array,
    scale: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    active: jax.Array,
) -> jax.Array:
    """The smallest weight that min-p, top-k and top-p keep, at least 1.

    Args:
        values: int32[R, V], weights that sum to less than 2**31.
        scale: float32[R], weight of the most likely token before rounding.
        top_k: int32[R]; 0 is off.
        top_p: float32[R]; 1 is off.
        min_p: float32[R], relative to the most likely token; 0 is off.
        active: bool[R]; other rows are left at 1 and cost nothing.

    Returns:
        int32[R].
    """
    floor = jnp.maximum(to_weight(min_p, scale), 1)
    ceiling = to_weight(jnp.ones_like(scale), scale) + 1
    use_k, use_p = active & (top_k > 0), active & (top_p < 1)
    start = _Search(
        stage=jnp.where(use_k, _TOP_K, jnp.where(use_p, _TOP_P, _DONE)),
        low=jnp.where(active, floor, 1),
        high=ceiling,
        high_tail=jnp.zeros_like(floor),
        target=jnp.zeros_like(floor),
    )

    def body(search: _Search) -> _Search:
        pivots = lax.optimization_barrier(_pivots(search.low, search.high))  # once, not for every token
        tails = _tails(values, pivots, search.stage == _TOP_K)
        target = jnp.where(search.target > 0, search.target, _target(search.stage, tails[:, 0], top_k, top_p))
        return _next_stage(_narrow(search, pivots, tails, target), use_p, ceiling)

    return lax.while_loop(lambda search: jnp.any(search.stage != _DONE), body, start).low


def _target(stage: jax.Array, total: jax.Array, top_k: jax.Array, top_p: jax.Array) -> jax.Array:
    mass = (top_p * total.astype(jnp.float32)).astype(jnp.int32)
    wanted = jnp.where(stage == _TOP_K, top_k, mass)
    return jnp.maximum(jnp.minimum(wanted, total), 1)


def _pivots(low: jax.Array, high: jax.Array) -> jax.Array:
    """int32[R, PIVOTS] from ``low`` upwards, below ``high``: in equal ratios while far apart, then in equal steps.

    Any increasing choice gives the same threshold; this one needs few passes, since weights spread over decades.
    """
    steps = lax.broadcasted_iota(jnp.int32, (1, PIVOTS), 1)
    span = (high - low)[:, None]
    linear = (span // PIVOTS) * steps + (span % PIVOTS) * steps // PIVOTS
    ratio = jnp.log(high.astype(jnp.float32) / low.astype(jnp.float32))[:, None]
    growth = jnp.exp(ratio * (steps.astype(jnp.float32) / PIVOTS)) - 1
    geometric = jnp.minimum(low.astype(jnp.float32)[:, None] * growth, 2.0**30).astype(jnp.int32)
    offset = jnp.where(ratio > 1, geometric, linear)
    # At least one step apart where there is room, so that every pass narrows the interval.
    return low[:, None] + jnp.clip(offset, jnp.minimum(steps, span - 1), span - 1)


def _tails(values: jax.Array, pivots: jax.Array, counting: jax.Array) -> jax.Array:
    """int32[R, PIVOTS]: over values >= pivot, their number (``counting`` rows) or their sum."""
    measure = jnp.where(counting[:, None], 1, values)
    # One reduction of many operands reads the row once, and its sums fill the lanes of a CPU's vectors.
    masked = [jnp.where(values >= pivots[:, index, None], measure, 0) for index in range(PIVOTS)]
    zeros = [jnp.int32(0)] * PIVOTS
    return jnp.stack(lax.reduce(masked, zeros, add_all, (1,)), axis=-1)


def _narrow(search: _Search, pivots: jax.Array, tails: jax.Array, target: jax.Array) -> _Search:
    reached = tails >= target[:, None]
    low = jnp.max(jnp.where(reached, pivots, search.low[:, None]), axis=-1)
    low_tail = jnp.min(jnp.where(reached, tails, jnp.iinfo(jnp.int32).max), axis=-1)
    high = jnp.minimum(search.high, jnp.min(jnp.where(reached, search.high[:, None], pivots), axis=-1))
    high_tail = jnp.maximum(search.high_tail, jnp.max(jnp.where(reached, 0, tails), axis=-1))
    # Done when [low, high) holds one token or one integer, or when the tail at low is exactly what was asked for.
    inside = low_tail - high_tail
    single = jnp.where(search.stage == _TOP_K, inside <= 1, inside // 2 < low)
    done = (high - low <= 1) | single | (low_tail == target)
    active = search.stage != _DONE
    return _Search(
        stage=jnp.where(active & done, search.stage + 1, search.stage),
        low=jnp.where(active, low, search.low),
        high=jnp.where(active, high, search.high),
        high_tail=jnp.where(active, high_tail, search.high_tail),
        target=jnp.where(active & done, 0, target),
    )


def _next_stage(search: _Search, use_p: jax.Array, ceiling: jax.Array) -> _Search:
    # top-p starts where top-k ended: among the weights from its threshold on.
    starts = (search.stage == _TOP_P) & (search.target == 0)
    return search._replace(
        stage=jnp.where(starts & ~use_p, _DONE, search.stage),
        high=jnp.where(starts, ceiling, search.high),
        high_tail=jnp.where(starts, 0, search.high_tail),
    )
