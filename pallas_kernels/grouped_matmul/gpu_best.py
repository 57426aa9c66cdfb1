"""The best experts of 16 tokens, in the registers of a Hopper warpgroup (Mosaic GPU).

Central idea: the best expert is found and taken out, as often as a token has experts. A row of logits is in 8 lanes of
a warp, so nothing leaves the warp; and it is a loop, since code that runs once takes longer to arrive than to run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.grouped_matmul.few import SMALLEST_SUM, Rule

TOKENS, LANES = 16, 8
"""Rows of a warpgroup's registers; lanes that hold one."""

MOST_EXPERTS = 128
"""Whose logits of 16 tokens fit into the registers of one warpgroup."""


class Best(NamedTuple):
    """What 16 tokens chose; C: their experts, rounded up to a multiple of 8.

    Attributes:
        weights: float32 [16, C], the best first.
        experts: int32 [16, C].
        chosen: bool [16, E].
        best: float32 [16], the highest logit.
        divisor: float32 [16], by which scores are divided; None: they are not.
    """

    weights: jax.Array
    experts: jax.Array
    chosen: jax.Array
    best: jax.Array
    divisor: jax.Array | None


def supported(num_experts: int) -> str | None:
    """Why it cannot choose among so many, None when it can."""
    if num_experts > MOST_EXPERTS or num_experts % 64:
        return f"the kernel chooses of 64 or {MOST_EXPERTS} experts, not {num_experts}"
    return None


def layout() -> Any:
    """Of [16 n, 8 m] values in registers, single ones, so that they can be stored transposed."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tiling = plgpu.Tiling(((TOKENS, LANES), (4, LANES), (1,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)


def filled(shape: tuple[int, ...], value: float, dtype: Any) -> jax.Array:
    """A constant in ``layout``, or that of its rows."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.layout_cast(
        jnp.full(shape, value, dtype), layout() if len(shape) == 2 else layout().reduce(1)
    )


def over_columns(x: jax.Array, num_columns: int) -> jax.Array:
    """[R] to [R, C]."""
    return lax.broadcast_in_dim(x, (x.shape[0], num_columns), [0])


def rounded(top_k: int) -> int:
    """Columns of ``Best``."""
    return -(-top_k // LANES) * LANES


def score(logits: jax.Array, best: jax.Array, rule: Rule) -> jax.Array:
    """Before it is divided."""
    return 1.0 / (1.0 + jnp.exp(-logits)) if rule.sigmoid else jnp.exp(logits - best)


def divided(scores: jax.Array, divisor: jax.Array | None, rule: Rule) -> jax.Array:
    """[16, C] weights."""
    if divisor is not None:
        scores = scores / over_columns(divisor, scores.shape[1])
    return scores * rule.scale


def best_of(logits: jax.Array, rule: Rule) -> Best:
    """Of float32 [16, E] in ``layout``; of equal ones the lower expert wins."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    num_experts, columns = logits.shape[1], rounded(rule.top_k)
    expert = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=layout())
    column = plgpu.broadcasted_iota(jnp.int32, (TOKENS, columns), 1, layout=layout())
    nothing = filled(logits.shape, -jnp.inf, jnp.float32)
    none = filled(logits.shape, num_experts, jnp.int32)

    def one_choice(choice, carry):
        left, best, total, scores, experts = carry
        most = jnp.max(left, axis=1)
        first = jnp.min(jnp.where(left == over_columns(most, num_experts), expert, none), axis=1)
        left = jnp.where(expert == over_columns(first, num_experts), nothing, left)
        best = jnp.maximum(best, most)
        mine = score(most, best, rule)
        here = column == choice
        scores = jnp.where(here, over_columns(mine, columns), scores)
        experts = jnp.where(here, over_columns(first, columns), experts)
        return left, best, total + mine, scores, experts

    left, best, total, scores, experts = lax.fori_loop(
        0, rule.top_k, one_choice,
        (
            logits, filled((TOKENS,), -jnp.inf, jnp.float32), filled((TOKENS,), 0.0, jnp.float32),
            filled((TOKENS, columns), 0.0, jnp.float32), filled((TOKENS, columns), 0, jnp.int32),
        ),
    )  # fmt: skip
    divisor = None
    if rule.renormalize:
        divisor = total + SMALLEST_SUM
    elif not rule.sigmoid:
        divisor = jnp.sum(jnp.exp(logits - over_columns(best, num_experts)), axis=1) + SMALLEST_SUM
    return Best(divided(scores, divisor, rule), experts, left == nothing, best, divisor)
