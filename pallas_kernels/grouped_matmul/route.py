"""The contract of kernels that route many tokens: who goes where, counted in blocks of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.few import SMALLEST_SUM, Rule

BLOCK = 32
"""Tokens."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routed:
    """The choices of T tokens in G blocks of 32, the best of each token first.

    Args:
        weights: float32 [G, k, 32], zero of padding.
        experts: int32 [G, k, 32]; E of padding.
        so_far: float32 [G, E, 32], whole numbers: how many of a block's tokens, up to each, chose an expert.
        counts: int32 [G, E]: how many of all of them did.
    """

    weights: jax.Array
    experts: jax.Array
    so_far: jax.Array
    counts: jax.Array

    def sizes(self) -> jax.Array:
        """int32 [E]: the tokens of each expert."""
        return jnp.sum(self.counts, axis=0, dtype=jnp.int32)

    def places(self) -> jax.Array:
        """int32 [G, k, 32]: a choice's place among all choices, sorted by expert; k T of padding."""
        num_blocks, num_experts = self.counts.shape
        number, block = jnp.arange(num_experts), jnp.arange(num_blocks)
        # Sums over triangles: one kernel each, where XLA makes two and more of a running sum.
        lower = jnp.where(number < number[:, None], self.sizes(), 0)
        before = jnp.where((block < block[:, None])[:, :, None], self.counts, 0)
        begins = jnp.sum(lower, axis=1, dtype=jnp.int32) + jnp.sum(before, axis=1, dtype=jnp.int32)
        alive = self.experts < num_experts
        here, expert = block[:, None, None], jnp.where(alive, self.experts, 0)
        earlier = self.so_far[here, expert, jnp.arange(BLOCK)].astype(jnp.int32) - 1
        return jnp.where(alive, begins[here, expert] + earlier, self.experts.size)


def route(logits: jax.Array, live: jax.Array, rule: Rule) -> Routed:
    """The oracle.

    Args:
        logits: float32 [T, E], T a multiple of 32; of equal ones the lower expert wins.
        live: bool [T]; the others are padding.
        rule: how.
    """
    num_experts = logits.shape[1]
    _, experts = jax.lax.top_k(logits, rule.top_k)
    scores = jax.nn.sigmoid(logits) if rule.sigmoid else jax.nn.softmax(logits, axis=-1)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if rule.renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + SMALLEST_SUM)
    weights = jnp.where(live[:, None], weights * rule.scale, 0.0)
    experts = jnp.where(live[:, None], experts, num_experts)
    chosen = jnp.any(experts[:, :, None] == jnp.arange(num_experts), axis=1).astype(jnp.int32)
    blocks = chosen.reshape(-1, BLOCK, num_experts)
    each = (jnp.swapaxes(x.reshape(-1, BLOCK, rule.top_k), 1, 2) for x in (weights, experts))
    so_far = jnp.swapaxes(jnp.cumsum(blocks, axis=1), 1, 2)
    return Routed(*each, so_far.astype(jnp.float32), jnp.sum(blocks, axis=1, dtype=jnp.int32))
