"""The largest logits of each row, found through the maxima of chunks instead of by sorting the vocabulary.

Central idea: the k largest tokens lie in the k chunks with the largest maxima. One pass finds all
maxima (which greedy decoding needs as well); what is left to sort is C maxima and k * CHUNK tokens.
Equal logits are ordered by token id, as ``lax.top_k`` does. NaN counts as -inf.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling.fixed_point import CHUNK, chunk_of, split_chunks


class ChunkedLogits(NamedTuple):
    """Logits in chunks with their maxima: what every way of choosing a token starts from."""

    chunks: jax.Array
    """float32[R, C, CHUNK], padded with -inf; no NaN."""
    maxima: jax.Array
    """float32[R, C]."""
    maximum: jax.Array
    """float32[R]; -inf for a row that holds no number."""


def chunk_logits(logits: jax.Array) -> ChunkedLogits:
    """Split float32[R, V] and find the maxima."""
    chunks = split_chunks(without_nan(logits), -jnp.inf)
    maxima = jnp.max(chunks, axis=-1)
    return ChunkedLogits(chunks, maxima, jnp.max(maxima, axis=-1))


def without_nan(logits: jax.Array) -> jax.Array:
    """NaN as -inf: a token that cannot be chosen."""
    return jnp.where(jnp.isnan(logits), -jnp.inf, logits)


def argmax(logits: ChunkedLogits) -> jax.Array:
    """The lowest id of each row's largest logit: int32[R]; -1 for a row that holds no number."""
    chunk = lax.argmax(logits.maxima, 1, jnp.int32)
    token = chunk * CHUNK + lax.argmax(chunk_of(logits.chunks, chunk), 1, jnp.int32)
    return jnp.where(logits.maximum > -jnp.inf, token, -1)


def top_tokens(logits: ChunkedLogits, k: int) -> tuple[jax.Array, jax.Array]:
    """Each row's ``k`` largest logits, largest first, and their token ids; equal ones by id.

    Args:
        k: static, at most C * CHUNK. Padding beyond V is -inf and comes last.

    Returns:
        float32[R, k] and int32[R, k].
    """
    num_rows, num_chunks, _ = logits.chunks.shape
    if 2 * k >= num_chunks:  # most chunks are wanted: nothing to win
        values, ids = lax.top_k(logits.chunks.reshape(num_rows, -1), k)
        return values, ids.astype(jnp.int32)
    _, chosen = lax.top_k(logits.maxima, k)
    chosen = jnp.sort(chosen.astype(jnp.int32), axis=-1)  # ascending, so that equal logits come by id
    inside = jnp.take_along_axis(logits.chunks, chosen[:, :, None], axis=1, mode="clip")
    values, places = lax.top_k(inside.reshape(num_rows, -1), k)
    places = places.astype(jnp.int32)
    chunk = jnp.take_along_axis(chosen, places // CHUNK, axis=1, mode="clip")
    return values, chunk * CHUNK + places % CHUNK
