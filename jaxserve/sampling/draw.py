"""Drawing a token at random, in two ways that a row's own parameters choose between.

- ``draw_from_top``: rows with a top-k of up to 64 are sampled from their 64 largest logits alone.
- ``draw_from_all``: all others. A chunk is drawn by its share of the probability, then a token inside it; no
  noise of the vocabulary's size is generated, and nothing is sorted.

top-p over the whole vocabulary is by rejection: a drawn token is in the nucleus if the tokens more
likely than it weigh less than p. If it is not, neither is any less likely one, so the next draw is
among the more likely ones alone, whose weights the test has just summed. What is accepted has exactly
the nucleus' distribution.

Filters apply in the order min-p, top-k, top-p.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling.filters import top_k_threshold
from jaxserve.sampling.fixed_point import (
    CHUNK,
    chunk_limbs,
    chunk_of,
    exp_shifted,
    limbs_total,
    limbs_value,
    pick,
    sum_exact,
    sum_wide,
    to_weight,
    weight_scale,
)
from jaxserve.sampling.metadata import MAX_TOP, Feature, SamplingMetadata
from jaxserve.sampling.random_bits import row_random_bits
from jaxserve.sampling.top_tokens import ChunkedLogits, top_tokens

MAX_DRAWS = 256
"""A bound that chance does not reach: of n tokens, about log(n) draws find one in the smallest nucleus."""

Branch = Callable[..., Any]
"""``branch(features, then, otherwise)``: ``then()`` where the step asks for any of the features."""


Bits = tuple[jax.Array, jax.Array]


def random_bits(metadata: SamplingMetadata, draw_round: int | jax.Array) -> Bits:
    """Two random words a row for its n-th draw at this position: uint32[R] each."""
    return row_random_bits(metadata.seed_lo, metadata.seed_hi, metadata.positions, draw_round)


def draw_from_top(logits: ChunkedLogits, metadata: SamplingMetadata, bits: Bits) -> jax.Array:
    """One token for each row with ``Feature.TOP_K``: int32[R]. ``bits`` are those of draw 0.

    Tokens equal to the k-th are kept as well, as far as the ``MAX_TOP`` largest hold them.
    """
    values, ids = top_tokens(logits, min(MAX_TOP, logits.chunks.shape[1] * CHUNK))
    exponentials = exp_shifted(values, logits.maximum, _temperature(metadata))
    kth = jnp.take_along_axis(values, jnp.maximum(metadata.top_k - 1, 0)[:, None], axis=1, mode="clip")
    kept = (exponentials >= metadata.min_p[:, None]) & (values >= kth)
    exponentials = jnp.where(kept, exponentials, 0.0)
    weights = to_weight(exponentials, weight_scale(sum_exact(exponentials)))
    target = _mass_target(metadata.top_p, sum_wide(weights))
    more_likely = jnp.where(weights[:, None, :] > weights[:, :, None], weights[:, None, :], 0)
    in_nucleus = sum_wide(more_likely) < target[:, None]
    chosen = pick(jnp.where(in_nucleus, weights, 0), bits[0])
    return jnp.take_along_axis(ids, chosen[:, None], axis=1, mode="clip")[:, 0]


def draw_from_all(logits: ChunkedLogits, metadata: SamplingMetadata, bits: Bits, branch: Branch) -> jax.Array:
    """One token for each row with ``Feature.RANDOM``, ``TOP_P`` or ``LARGE_TOP_K``: int32[R]."""
    row = _Row(logits, metadata)
    chunk_weights, threshold = branch(
        Feature.LARGE_TOP_K, row.after_top_k, lambda: (row.chunk_weights, jnp.zeros_like(metadata.top_k))
    )
    target = _mass_target(metadata.top_p, sum_wide(chunk_weights))
    drawing = metadata.rows_with(Feature.RANDOM | Feature.TOP_P | Feature.LARGE_TOP_K)
    tested = metadata.rows_with(Feature.TOP_P)

    def draw(state: _Draws) -> _Draws:
        token, weight = row.draw(state.chunk_weights, state.threshold, state.bits)
        token = jnp.where(state.drawing, token, state.token)
        more_likely = branch(
            Feature.TOP_P, lambda: row.chunk_weights_above(weight), lambda: jnp.zeros_like(chunk_weights)
        )
        following = state.round + 1
        rejected = state.drawing & tested & (sum_wide(more_likely) >= target) & (following < MAX_DRAWS)
        return _Draws(following, random_bits(metadata, following), rejected, token, more_likely, weight + 1)

    start = _Draws(jnp.int32(0), bits, drawing, jnp.zeros_like(metadata.top_k), chunk_weights, threshold)
    never_rejects = branch(Feature.TOP_P, lambda: False, lambda: True)
    if never_rejects is True:
        return draw(start).token
    return lax.while_loop(lambda state: jnp.any(state.drawing), draw, start).token


class _Draws(NamedTuple):
    """One draw after another, until no row's token is rejected."""

    round: jax.Array
    """int32[]: draws so far."""
    bits: Bits
    """Of the next draw. Carried, so that they are computed once and not wherever they are read."""
    drawing: jax.Array
    """bool[R]: rows that draw (again)."""
    token: jax.Array
    """int32[R]."""
    chunk_weights: jax.Array
    """int32[R, C]: what a chunk holds of the tokens to draw from."""
    threshold: jax.Array
    """int32[R]: the least weight of the tokens to draw from."""


class _Row:
    """The rows' probabilities over the whole vocabulary, after min-p: what a draw needs, traced once."""

    def __init__(self, logits: ChunkedLogits, metadata: SamplingMetadata) -> None:
        self.logits, self.metadata = logits, metadata
        self.temperature = _temperature(metadata)
        high, low = chunk_limbs(self.exponentials(logits.chunks))
        self.scale = weight_scale(limbs_total(high, low))
        self.chunk_weights = to_weight(limbs_value(high, low), self.scale)
        """int32[R, C]: each chunk's share; a row's sum to just under 2**31."""

    def exponentials(self, values: jax.Array) -> jax.Array:
        """float32[R, ...]: relative to the most likely token, 0 below min-p."""
        exponentials = exp_shifted(values, self.logits.maximum, self.temperature)
        min_p = self.metadata.min_p.reshape((-1,) + (1,) * (values.ndim - 1))
        return jnp.where(exponentials >= min_p, exponentials, 0.0)

    def weights(self) -> jax.Array:
        """int32[R, C, CHUNK]: each token's share."""
        return to_weight(self.exponentials(self.logits.chunks), self.scale)

    def after_top_k(self) -> tuple[jax.Array, jax.Array]:
        """Chunk weights and smallest weight of what a large top-k leaves; unchanged, and 0, in other rows."""
        weights = self.weights()
        active = self.metadata.rows_with(Feature.LARGE_TOP_K)
        largest = to_weight(jnp.ones_like(self.scale), self.scale)
        flat = weights.reshape(weights.shape[0], -1)
        threshold = top_k_threshold(flat, largest, self.metadata.top_k, active)
        kept = sum_wide(jnp.where(weights >= threshold[:, None, None], weights, 0))
        chunk_weights = jnp.where(active[:, None], kept, self.chunk_weights)
        return chunk_weights, jnp.where(active, threshold, 0)

    def draw(self, chunk_weights: jax.Array, threshold: jax.Array, bits: Bits) -> tuple[jax.Array, jax.Array]:
        """A token of weight >= ``threshold`` from a chunk drawn by ``chunk_weights``, and its weight."""
        chunk = pick(chunk_weights, bits[0])
        inside = chunk_of(self.logits.chunks, chunk)
        largest = jnp.take_along_axis(self.logits.maxima, chunk[:, None], axis=1, mode="clip")
        exponentials = self.exponentials(jnp.concatenate([inside, largest], axis=1))
        weights = to_weight(exponentials, self.scale)
        # Never beyond the chunk's largest: something in it is kept, or it would not have been drawn.
        threshold = jnp.minimum(threshold, weights[:, CHUNK])
        kept = (weights[:, :CHUNK] >= threshold[:, None]) & (exponentials[:, :CHUNK] > 0)
        exponentials = jnp.where(kept, exponentials[:, :CHUNK], 0.0)
        place = pick(to_weight(exponentials, weight_scale(sum_exact(exponentials))), bits[1])
        weight = jnp.take_along_axis(weights, place[:, None], axis=1, mode="clip")[:, 0]
        return chunk * CHUNK + place, weight

    def chunk_weights_above(self, weight: jax.Array) -> jax.Array:
        """int32[R, C]: what each chunk holds of the tokens that weigh more than ``weight`` (int32[R])."""
        weights = self.weights()
        return sum_wide(jnp.where(weights > weight[:, None, None], weights, 0))


def _mass_target(top_p: jax.Array, total: jax.Array) -> jax.Array:
    """int32[R] in [1, total]: what the tokens more likely than one of the nucleus weigh less than."""
    mass = (top_p * total.astype(jnp.float32)).astype(jnp.int32)
    return jnp.maximum(jnp.minimum(mass, total), 1)


def _temperature(metadata: SamplingMetadata) -> jax.Array:
    return jnp.where(metadata.temperature > 0, metadata.temperature, 1.0)
