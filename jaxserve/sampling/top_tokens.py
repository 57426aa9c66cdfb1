"""The largest logits of each row, found through the maxima of chunks instead of by sorting the vocabulary.

Central idea: the k largest tokens lie in the k chunks with the largest maxima. One pass finds all
maxima (which greedy decoding needs as well); what is left to sort is C maxima and k * CHUNK tokens.
Equal logits are ordered by token id, as ``lax.top_k`` does.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.sampling.fixed_point import CHUNK, chunk_of, split_chunks


class ChunkedLogits(NamedTuple):
    """Logits in chunks, and where the largest is: what every way of choosing a token starts from."""

    chunks: jax.Array
    """float32[R, C, CHUNK], padded with -inf."""
    maxima: jax.Array
    """float32[R, C]."""
    maximum: jax.Array
    """float32[R]; -inf or NaN for a row that holds no number."""
    argmax: jax.Array
    """int32[R]: the lowest id of the largest logit; -1 for a row that holds no number."""


def chunk_logits(logits: jax.Array) -> ChunkedLogits:
    """Split float32[R, V] and find the maxima in one pass.

    Of a row with a NaN, the backend may make one that holds no number, or miss the largest.
    """
    chunks = split_chunks(logits, -jnp.inf)
    maxima = jnp.max(chunks, axis=-1)
    maximum, chunk = max_and_index(maxima)
    _, place = max_and_index(without_nan(chunk_of(chunks, chunk)))
    return ChunkedLogits(chunks, maxima, maximum, jnp.where(maximum > -jnp.inf, chunk * CHUNK + place, -1))


def without_nan(logits: jax.Array) -> jax.Array:
    """NaN as -inf: a token that cannot be chosen."""
    return jnp.where(jnp.isnan(logits), -jnp.inf, logits)


def max_and_index(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest of each row of float32[R, N], and its lowest index: float32[R], int32[R]."""
    ids = lax.broadcasted_iota(jnp.int32, values.shape, 1)

    def larger(a: list[jax.Array], b: list[jax.Array]) -> list[jax.Array]:
        first = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return [jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])]

    value, index = lax.reduce([values, ids], [jnp.float32(-jnp.inf), jnp.int32(0)], larger, (1,))
    return value, index


def top_tokens(logits: ChunkedLogits, k: int) -> tuple[jax.Array, jax.Array]:
    """Each row's ``k`` largest logits, largest first, and their token ids; equal ones by id.

    Args:
        k: static, at most C * CHUNK. Padding beyond V is -inf and comes last, as does NaN.

    Returns:
        float32[R, k] and int32[R, k].
    """
    num_rows, num_chunks, _ = logits.chunks.shape
    if 2 * k >= num_chunks:  # most chunks are wanted: nothing to win
        return _top_k(without_nan(logits.chunks.reshape(num_rows, -1)), k)
    _, chosen = _top_k(logits.maxima, k)
    chosen = jnp.sort(chosen, axis=-1)  # ascending, so that equal logits come by id
    inside = jnp.take_along_axis(logits.chunks, chosen[:, :, None], axis=1, mode="clip")
    values, places = _top_k(without_nan(inside.reshape(num_rows, -1)), k)
    chunk = jnp.take_along_axis(chosen, places // CHUNK, axis=1, mode="clip")
    return values, chunk * CHUNK + places % CHUNK


_TPU_TOP_K_SIZE = 16384


def _top_k(values: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """``lax.top_k`` of float32[R, N]."""

    def directly(values: jax.Array) -> list[jax.Array]:
        return list(lax.top_k(values, k))

    def padded(values: jax.Array) -> list[jax.Array]:
        # Smaller arrays are sorted whole there, by a program that takes ten seconds to compile.
        padding = max(_TPU_TOP_K_SIZE - values.shape[1], 0)
        return directly(jnp.pad(values, ((0, 0), (0, padding)), constant_values=-jnp.inf))

    largest, ids = lax.platform_dependent(values, tpu=padded, default=directly)
    return largest, jnp.minimum(ids.astype(jnp.int32), values.shape[1] - 1)
