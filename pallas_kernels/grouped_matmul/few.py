"""The contract of kernels for few tokens: every token through every expert in use."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

COLUMNS = 64
"""Tokens that there is room for beside each expert."""
SMALLEST_SUM = 1e-20
"""Added to a sum of sigmoids that weights are divided by: all of them may have underflowed."""


@dataclass(frozen=True)
class Rule:
    """How plain routers choose: the best scores, which a softmax or sigmoids leave in the order of the logits.

    Args:
        top_k: experts a token.
        sigmoid: scores are sigmoids, otherwise a softmax over all experts.
        renormalize: the chosen experts' weights add up to 1.
        scale: multiplies the weights, last.
    """

    top_k: int
    sigmoid: bool = False
    renormalize: bool = False
    scale: float = 1.0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chosen:
    """Which experts the tokens of a step chose.

    Args:
        weights: float32 [E, C], C >= T: a token's weight at an expert; zero where it did not choose it.
        used: int32 [E], the experts that any token chose, ascending; what follows them is in range and meaningless.
        up_to: int32 [E], how many of the experts 0 to e any token chose.
        zero: int32 [E] zeros: a fresh array, for a kernel that counts in it.
    """

    weights: jax.Array
    used: jax.Array
    up_to: jax.Array
    zero: jax.Array

    @classmethod
    def of(cls, weights: jax.Array, experts: jax.Array, num_experts: int) -> Chosen:
        """From the choices.

        Args:
            weights: float32 [T, k].
            experts: int32 [T, k]; out of range: none.
            num_experts: E.
        """
        padding = ((0, -experts.shape[0] % COLUMNS), (0, 0))
        experts = jnp.pad(experts, padding, constant_values=num_experts)
        numbers = jnp.arange(num_experts, dtype=jnp.int32)
        is_it = experts[None] == numbers[:, None, None]  # [E, C, k]
        weights = jnp.sum(jnp.where(is_it, jnp.pad(weights, padding), 0.0), axis=-1)
        in_use = jnp.any(is_it, axis=(1, 2))
        up_to = jnp.sum(in_use & (numbers <= numbers[:, None]), axis=1, dtype=jnp.int32)
        used = jnp.sum(up_to <= numbers[:, None], axis=1, dtype=jnp.int32)
        return cls(weights, jnp.minimum(used, num_experts - 1), up_to, jnp.zeros_like(up_to))


def choose(logits: jax.Array, live: jax.Array, rule: Rule) -> tuple[Chosen, jax.Array]:
    """The oracle: the experts of each token, and int32 [E]: the tokens that each expert got.

    Args:
        logits: float32 [T, E]; of equal ones the lower expert wins.
        live: bool [T]; the others are padding, which chooses nobody.
        rule: how.
    """
    num_experts = logits.shape[1]
    _, experts = jax.lax.top_k(logits, rule.top_k)
    scores = jax.nn.sigmoid(logits) if rule.sigmoid else jax.nn.softmax(logits, axis=-1)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if rule.renormalize:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + SMALLEST_SUM)
    experts = jnp.where(live[:, None], experts, num_experts)
    load = jnp.sum(experts.reshape(-1, 1) == jnp.arange(num_experts), axis=0, dtype=jnp.int32)
    return Chosen.of(weights * rule.scale, experts, num_experts), load


def gated_mlp(x: jax.Array, gate_up: jax.Array, down: jax.Array, chosen: Chosen) -> jax.Array:
    """The oracle: float32 [T, M], the sum of each token's experts' down(silu(gate) * up), by its weights.

    Args:
        x: [T, M].
        gate_up: [E, 2, F, M].
        down: [E, M, F].
        chosen: the experts.
    """
    wide, exact = jnp.float32, jax.lax.Precision.HIGHEST
    gate, up = jnp.einsum("tm,ehfm->hetf", x.astype(wide), gate_up.astype(wide), precision=exact)
    hidden = jax.nn.silu(gate) * up * chosen.weights[:, : x.shape[0], None]
    return jnp.einsum("etf,emf->tm", hidden, down.astype(wide), precision=exact)
