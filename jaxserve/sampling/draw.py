"""Drawing a token at random, in two ways that a row's own parameters choose between.

``draw_from_top``: rows with a top-k of up to 64 are sampled from their 64 largest logits alone.
``draw_from_all``:
all others, over the whole vocabulary: a chunk by its share of the probability, then a token inside it.
No noise of the vocabulary's size is generated in either.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling.filters import find_threshold, mass_target
from jaxserve.sampling.fixed_point import (
    CHUNK,
    chunk_limbs,
    chunk_of,
    exp_shifted,
    limbs_total,
    limbs_value,
    pick,
    sum_exact,
    to_weight,
    weight_scale,
)
from jaxserve.sampling.metadata import MAX_TOP, Feature, SamplingMetadata
from jaxserve.sampling.random_bits import row_random_bits
from jaxserve.sampling.top_tokens import ChunkedLogits, top_tokens


def draw_from_top(logits: ChunkedLogits, metadata: SamplingMetadata) -> jax.Array:
    """One token a row by min-p, then top-k, then top-p, for rows with ``Feature.TOP_K``: int32[R].

    Tokens equal to the k-th are kept as well, as far as the ``MAX_TOP`` largest hold them.
    """
    values, ids = top_tokens(logits, min(MAX_TOP, logits.chunks.shape[1] * CHUNK))
    exponentials = exp_shifted(values, logits.maximum, _temperature(metadata))
    kth = jnp.take_along_axis(values, jnp.maximum(metadata.top_k - 1, 0)[:, None], axis=1, mode="clip")
    kept = (exponentials >= metadata.min_p[:, None]) & (values >= kth)
    exponentials = jnp.where(kept, exponentials, 0.0)
    weights = to_weight(exponentials, weight_scale(sum_exact(exponentials)))
    target = mass_target(metadata.top_p, jnp.sum(weights, axis=-1))
    above = jnp.where(weights[:, None, :] > weights[:, :, None], weights[:, None, :], 0)
    in_nucleus = jnp.sum(above, axis=-1) < target[:, None]
    chosen = pick(jnp.where(in_nucleus, weights, 0), _random_bits(metadata)[0])
    return jnp.take_along_axis(ids, chosen[:, None], axis=1, mode="clip")[:, 0]


def draw_from_all(
    logits: ChunkedLogits, metadata: SamplingMetadata, filtering: bool | jax.Array
) -> jax.Array:
    """One token a row by min-p, then top-k, then top-p: int32[R].

    Args:
        filtering: whether any row has ``Feature.FILTER`` (top-k or top-p that need the whole row); a
            Python bool
            decides it while tracing.
    """
    temperature = _temperature(metadata)
    high, low = chunk_limbs(_exponentials(logits.chunks, logits.maximum, temperature, metadata.min_p))
    scale = weight_scale(limbs_total(high, low))
    chunk_weights = to_weight(limbs_value(high, low), scale)
    threshold = jnp.zeros_like(metadata.top_k)

    def filtered(_: None) -> tuple[jax.Array, jax.Array]:
        exponentials = _exponentials(logits.chunks, logits.maximum, temperature, metadata.min_p)
        return _filter(to_weight(exponentials, scale), scale, chunk_weights, metadata)

    if filtering is True:
        chunk_weights, threshold = filtered(None)
    elif filtering is not False:
        chunk_weights, threshold = lax.cond(filtering, filtered, lambda _: (chunk_weights, threshold), None)

    first, second = _random_bits(metadata)
    chunk = pick(chunk_weights, first)
    inside = chunk_of(logits.chunks, chunk)
    exponentials = _exponentials(inside, logits.maximum, temperature, metadata.min_p)
    weights = to_weight(exponentials, scale)
    # Never beyond the chunk's largest: something in it was kept, or it would not have been picked.
    threshold = jnp.minimum(threshold, jnp.max(weights, axis=-1))
    kept = (weights >= threshold[:, None]) & (exponentials > 0)
    # Scaled anew by the chunk's own maximum: the tokens of an unlikely chunk keep their full resolution.
    values = jnp.where(kept, inside, -jnp.inf)
    exponentials = exp_shifted(values, jnp.max(values, axis=-1), temperature)
    return chunk * CHUNK + pick(to_weight(exponentials, weight_scale(sum_exact(exponentials))), second)


def _filter(
    weights: jax.Array, scale: jax.Array, chunk_weights: jax.Array, metadata: SamplingMetadata
) -> tuple[jax.Array, jax.Array]:
    """Chunk weights of what the filters keep, and the threshold; other rows get back what they had, and 0."""
    active = metadata.rows_with(Feature.FILTER)
    flat = weights.reshape(weights.shape[0], -1)
    largest = to_weight(jnp.ones_like(scale), scale)
    threshold = find_threshold(flat, largest, metadata.top_k, metadata.top_p, active)
    kept = jnp.sum(jnp.where(weights >= threshold[:, None, None], weights, 0), axis=-1)
    return jnp.where(active[:, None], kept, chunk_weights), jnp.where(active, threshold, 0)


def _exponentials(
    values: jax.Array, maximum: jax.Array, temperature: jax.Array, min_p: jax.Array
) -> jax.Array:
    exponentials = exp_shifted(values, maximum, temperature)
    return jnp.where(exponentials >= min_p.reshape((-1,) + (1,) * (values.ndim - 1)), exponentials, 0.0)


def _temperature(metadata: SamplingMetadata) -> jax.Array:
    return jnp.where(metadata.temperature > 0, metadata.temperature, 1.0)


def _random_bits(metadata: SamplingMetadata) -> tuple[jax.Array, jax.Array]:
    return row_random_bits(metadata.seed_lo, metadata.seed_hi, metadata.positions)
