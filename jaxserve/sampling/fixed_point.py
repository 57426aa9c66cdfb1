"""Probabilities as integers, so that a row's result cannot depend on the order in which it was summed.

Integer sums are exact: whatever tiling a compiler picks for a batch of 1 or of 256 rows, thresholds, normalisers and
sampled tokens come out the same, bit for bit. A row's probabilities are scaled to sum to just under 2**31 (``weights``);
a token of probability below 2**-32 has weight 0 and is never sampled. The normaliser itself is summed exactly from
two 24-bit limbs (``sum_exact``). Float arithmetic is left only where it is elementwise, or scales by powers of two.

R rows, V vocabulary; vocabularies up to 1,048,576 tokens keep every partial sum inside an int32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 64
"""Tokens summed first: 64 limbs of 24 bits fit an int32."""
MAX_VOCAB = 1 << 20
_LIMB = float(1 << 24)
_TOTAL = float((1 << 31) - (1 << 22))
# The slack of 2**22 below 2**31 covers rounding each weight up by a half (V / 2) and the float error of the scale.


def split_chunks(values: jax.Array) -> jax.Array:
    """[R, V] -> [R, ceil(V / CHUNK), CHUNK], padded with zeros."""
    rows, size = values.shape
    padding = -size % CHUNK
    if padding:
        values = jnp.pad(values, ((0, 0), (0, padding)))
    return values.reshape(rows, -1, CHUNK)


def exp_shifted(values: jax.Array, maximum: jax.Array, temperature: jax.Array | None = None) -> jax.Array:
    """exp((values - maximum) / temperature), 0 for -inf and NaN: float32[R, V] in [0, 1], never NaN.

    Args:
        values: float32[R, V].
        maximum: float32[R], each row's largest number.
        temperature: float32[R] > 0; None is 1.
    """
    shifted = jnp.where(
        values == maximum[:, None], 0.0, values - maximum[:, None]
    )  # +inf - +inf would be NaN
    if temperature is not None:
        shifted = shifted * (1 / temperature)[:, None]
    return jnp.where(values > -jnp.inf, jnp.exp(shifted), 0.0)


def sum_exact(values: jax.Array) -> jax.Array:
    """Row sums of float32[R, V] in [0, 1], to within V * 2**-49 before one rounding: float32[R]."""
    scaled = values * _LIMB
    high = jnp.floor(scaled)
    low = jnp.round((scaled - high) * _LIMB)
    limbs = [split_chunks(limb.astype(jnp.int32)) for limb in (high, low)]
    high_sums, low_sums = lax.reduce(limbs, [jnp.int32(0)] * 2, add_all, (2,))
    return _sum_chunks(high_sums) * (1 / _LIMB) + _sum_chunks(low_sums) * (1 / _LIMB**2)


def add_all(left: list[jax.Array], right: list[jax.Array]) -> list[jax.Array]:
    """The reducer of several sums at once: the operands' common source is read once."""
    return [a + b for a, b in zip(left, right, strict=True)]


def _sum_chunks(sums: jax.Array) -> jax.Array:
    # int32[R, C] of at most 2**30 each would overflow: add their upper and lower halves apart.
    upper = jnp.sum(sums >> 15, axis=-1).astype(jnp.float32)
    lower = jnp.sum(sums & 0x7FFF, axis=-1).astype(jnp.float32)
    return upper * float(1 << 15) + lower


def weights(exponentials: jax.Array, total: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Probabilities as integers that sum to less than 2**31.

    Args:
        exponentials: float32[R, V] in [0, 1], the largest of a row being 1 (or all 0).
        total: float32[R], their sums.

    Returns:
        weights int32[R, V], and the scale float32[R]: the weight of an exponential of 1 before rounding.
    """
    scale = _TOTAL / jnp.maximum(total, 1.0)
    return to_weight(exponentials, scale[:, None]), scale


def to_weight(exponentials: jax.Array, scale: jax.Array) -> jax.Array:
    """Round ``exponentials * scale`` to int32. Monotone, so comparing weights compares probabilities."""
    return jnp.round(exponentials * scale).astype(jnp.int32)


def multiply_high(a: jax.Array, b: jax.Array) -> jax.Array:
    """floor(a * b / 2**32) of uint32 arrays, without 64-bit integers."""
    a_high, a_low = a >> 16, a & 0xFFFF
    b_high, b_low = b >> 16, b & 0xFFFF
    low = a_low * b_low
    middle = a_high * b_low + (low >> 16)
    cross = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (cross >> 16)


def pick(values: jax.Array, random_bits: jax.Array) -> jax.Array:
    """Inverse of the cumulated weights: token v of each row with probability values[v] / sum(values).

    Three levels of sums (the row's chunks of chunks, chunks, tokens), so that no row-sized prefix sum is made. A
    token of weight 0 is never picked.

    Args:
        values: int32[R, V] >= 0 with row sums below 2**31.
        random_bits: uint32[R], uniform.

    Returns:
        int32[R]; 0 for rows without weight.
    """
    chunks = split_chunks(values)
    sums = jnp.sum(chunks, axis=-1)
    groups = split_chunks(sums)
    group_sums = jnp.sum(groups, axis=-1)
    total = jnp.sum(group_sums, axis=-1)
    target = multiply_high(random_bits, total.astype(jnp.uint32)).astype(jnp.int32)
    group, target = _descend(group_sums, target)
    chunk, target = _descend(_row_of(groups, group), target)
    chunk = group * CHUNK + chunk
    token, _ = _descend(_row_of(chunks, chunk), target)
    return jnp.where(total > 0, chunk * CHUNK + token, 0)


def _row_of(values: jax.Array, index: jax.Array) -> jax.Array:
    # values[r, index[r]]: [R, N, CHUNK] -> [R, CHUNK]
    return jnp.take_along_axis(values, index[:, None, None], axis=1, mode="clip")[:, 0]


def _descend(values: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The first index whose cumulated sum exceeds target, and what of target is left for inside it.
    size = values.shape[1]
    upto = lax.broadcasted_iota(jnp.int32, (size, size), 0) >= lax.broadcasted_iota(
        jnp.int32, (size, size), 1
    )
    cumulated = jnp.sum(jnp.where(upto[None], values[:, None, :], 0), axis=-1)
    passed = cumulated <= target[:, None]
    index = jnp.sum(passed, axis=-1, dtype=jnp.int32)
    before = jnp.max(jnp.where(passed, cumulated, 0), axis=-1)
    return jnp.minimum(index, size - 1), target - before
