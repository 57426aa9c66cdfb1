"""The contract of kernels that route many tokens: who goes where, counted in blocks of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_matmul.few import SMALLEST_SUM, Rule

BLOCK = 64
"""Tokens."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Routed:
    """The choices of T tokens in G blocks of 64, the best of each token first.

    Args:
        weights: float32 [G, k, 64], zero of padding.
        experts: int32 [G, k, 64]; E of padding.
        earlier: int32 [G, k, 64]: how many earlier tokens of the block chose the same expert; of padding meaningless.
        counts: int32 [G, E]: how many of each block's tokens chose an expert.
    """

    weights: jax.Array
    experts: jax.Array
    earlier: jax.Array
    counts: jax.Array

    def sizes(self) -> jax.Array:
        """int32 [E]: the tokens of each expert."""
        return jnp.sum(self.counts, axis=0, dtype=jnp.int32)

    def places(self) -> jax.Array:
        """int32 [G, k, 64]: a choice's place among all choices, sorted by expert; k T of padding."""
        num_blocks, num_experts = self.counts.shape
        number, block = jnp.arange(num_experts), jnp.arange(num_blocks)
        # Sums over triangles: one kernel each, where XLA makes two and more of a running sum.
        lower = jnp.where(number < number[:, None], self.sizes(), 0)
        before = jnp.where((block < block[:, None])[:, :, None], self.counts, 0)
        begins = jnp.sum(lower, axis=1, dtype=jnp.int32) + jnp.sum(before, axis=1, dtype=jnp.int32)
        alive = self.experts < num_experts
        begin = begins[block[:, None, None], jnp.where(alive, self.experts, 0)]
        return jnp.where(alive, begin + self.earlier, self.experts.size)


def route(logits: jax.Array, live: jax.Array, rule: Rule) -> Routed:
    """The oracle.

    Args:
        logits: float32 [T, E], T a multiple of 64; of equal ones the lower expert wins.
        live: bool [T]; the others are padding.
        rule: how.
    """
    num_tokens, num_experts = logits.shape
    _, experts = jax.lax.top_k(logits, rule.top_k)
    scores = jax.nn.sigmoid(logits) if rule.sigmoid else jax.nn.softmax(logits, axis=-1)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if rule.renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + SMALLEST_SUM)
    weights = jnp.where(live[:, None], weights * rule.scale, 0.0)
    experts = jnp.where(live[:, None], experts, num_experts)
    chosen = jnp.any(experts[:, :, None] == jnp.arange(num_experts), axis=1).astype(jnp.int32)
    blocks = chosen.reshape(-1, BLOCK, num_experts)
    before = (jnp.cumsum(blocks, axis=1) - blocks).reshape(num_tokens, num_experts)
    earlier = jnp.take_along_axis(before, jnp.minimum(experts, num_experts - 1), axis=1)
    each = (jnp.swapaxes(x.reshape(-1, BLOCK, rule.top_k), 1, 2) for x in (weights, experts, earlier))
    return Routed(*each, jnp.sum(blocks, axis=1, dtype=jnp.int32))
