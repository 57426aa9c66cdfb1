"""Probabilities as integers, so that a row's result cannot depend on the order in which it was summed.

Integer sums are exact: whatever tiling a compiler picks for a batch of 1 or of 256 rows, normalisers,
thresholds and sampled tokens come out the same, bit for bit. An exponential in [0, 1] is summed as two limbs
of 24 bits (``chunk_limbs``); weights are probabilities scaled to sum to just under 2**31 (``to_weight``).
Float arithmetic is left only where it is elementwise, or scales by powers of two.

R rows, V vocabulary, C = ceil(V / CHUNK) chunks. V up to 1,048,576 keeps every partial sum inside an int32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 64
"""Tokens that are summed first: 64 limbs of 24 bits fit an int32."""
MAX_VOCAB = 1 << 20
_LIMB = float(1 << 24)
_TOTAL = float((1 << 31) - (1 << 22))
# The slack below 2**31 covers rounding V weights up by a half each, and the float error of the scale.


def split_chunks(values: jax.Array, fill: float = 0) -> jax.Array:
    """[R, N] -> [R, ceil(N / CHUNK), CHUNK], padded with ``fill``."""
    rows, size = values.shape
    padding = -size % CHUNK
    if padding:
        values = jnp.pad(values, ((0, 0), (0, padding)), constant_values=fill)
    return values.reshape(rows, -1, CHUNK)


def chunk_of(chunks: jax.Array, index: jax.Array) -> jax.Array:
    """Row r's chunk ``index[r]``: [R, C, CHUNK] and int32[R] -> [R, CHUNK]."""
    return jnp.take_along_axis(chunks, index[:, None, None], axis=1, mode="clip")[:, 0]


def exp_shifted(values: jax.Array, maximum: jax.Array, temperature: jax.Array | None = None) -> jax.Array:
    """exp((values - maximum) / temperature): float32 in [0, 1], 0 for -inf and NaN.

    Args:
        values: float32[R, ...].
        maximum: float32[R], each row's largest number.
        temperature: float32[R] > 0; None is 1.
    """
    per_row = (-1,) + (1,) * (values.ndim - 1)
    maximum = maximum.reshape(per_row)
    # No difference at the maximum (inf - inf is NaN), nor beyond it (a NaN may have hidden the true one).
    shifted = jnp.where(values >= maximum, 0.0, values - maximum)
    if temperature is not None:
        shifted = shifted * (1 / temperature).reshape(per_row)
    return jnp.where(values > -jnp.inf, jnp.exp(shifted), 0.0)


def chunk_limbs(exponentials: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums over the last axis of values in [0, 1], in units of 2**-24 and (what is left) of 2**-48.

    Args:
        exponentials: float32[R, C, CHUNK].

    Returns:
        int32[R, C] twice.
    """
    scaled = exponentials * _LIMB
    high = jnp.floor(scaled)
    low = jnp.round((scaled - high) * _LIMB)
    high_sums, low_sums = sums(high.astype(jnp.int32), low.astype(jnp.int32))
    return high_sums, low_sums


def sums(*operands: jax.Array) -> list[jax.Array]:
    """Sums of int32 arrays of one shape over their last axis, in one reduction.

    What the operands have in common is read once. On a CPU the sums fill the lanes of a vector, which
    for a single sum of integers they do not.
    """

    def add(left: list[jax.Array], right: list[jax.Array]) -> list[jax.Array]:
        return [a + b for a, b in zip(left, right, strict=True)]

    return lax.reduce(list(operands), [jnp.int32(0)] * len(operands), add, (operands[0].ndim - 1,))


def sum_wide(values: jax.Array) -> jax.Array:
    """The sum of int32 >= 0 over the last axis, where it fits an int32.

    In halves, for ``sums``: XLA's CPU compiler makes two slow kernels of a single sum of integers.
    """
    high, low = sums(values >> 16, values & 0xFFFF)
    return (high << 16) + low


def limbs_value(high: jax.Array, low: jax.Array) -> jax.Array:
    """The sum that two limb sums stand for, as float32 of the same shape."""
    return high.astype(jnp.float32) * (1 / _LIMB) + low.astype(jnp.float32) * (1 / _LIMB**2)


def limbs_total(high: jax.Array, low: jax.Array) -> jax.Array:
    """The sum over all chunks: int32[R, C] twice -> float32[R]."""
    # Chunk sums of up to 2**30 would overflow when added: their upper and lower halves do not.
    halves = sums(high >> 15, high & 0x7FFF, low >> 15, low & 0x7FFF)
    high_upper, high_lower, low_upper, low_lower = (half.astype(jnp.float32) for half in halves)
    total = (high_upper * float(1 << 15) + high_lower) * (1 / _LIMB)
    return total + (low_upper * float(1 << 15) + low_lower) * (1 / _LIMB**2)


def sum_exact(exponentials: jax.Array) -> jax.Array:
    """Row sums of float32[R, N] in [0, 1], to within N * 2**-49 before rounding: float32[R]."""
    return limbs_total(*chunk_limbs(split_chunks(exponentials)))


def weight_scale(total: jax.Array) -> jax.Array:
    """The weight of an exponential of 1 in a row whose exponentials sum to ``total``: float32[R]; 0 for 0."""
    return jnp.where(total > 0, _TOTAL / total, 0.0)


def to_weight(exponentials: jax.Array, scale: jax.Array) -> jax.Array:
    """round(exponentials * scale) as int32; a row's sum stays below 2**31. Monotone: order is kept.

    Args:
        exponentials: float32[R, ...], or sums of such.
        scale: float32[R], from ``weight_scale``.
    """
    return jnp.round(exponentials * scale.reshape((-1,) + (1,) * (exponentials.ndim - 1))).astype(jnp.int32)


def multiply_high(a: jax.Array, b: jax.Array) -> jax.Array:
    """floor(a * b / 2**32) of uint32 arrays, without 64-bit integers."""
    a_high, a_low = a >> 16, a & 0xFFFF
    b_high, b_low = b >> 16, b & 0xFFFF
    middle = a_high * b_low + (a_low * b_low >> 16)
    cross = a_low * b_high + (middle & 0xFFFF)
    return a_high * b_high + (middle >> 16) + (cross >> 16)


def pick(weights: jax.Array, random_bits: jax.Array) -> jax.Array:
    """Index i of each row with probability weights[i] / sum(weights): the inverse of the cumulated weights.

    It descends through sums of CHUNK sums, so no long prefix sum is made. Weight 0 is never picked.

    Args:
        weights: int32[R, N] >= 0 with row sums below 2**31.
        random_bits: uint32[R], uniform.

    Returns:
        int32[R]; 0 for rows without weight.
    """
    levels = [weights]
    while levels[-1].shape[1] > CHUNK:
        levels.append(sum_wide(split_chunks(levels[-1])))
    before, upto = _cumulated(levels[-1])
    target = multiply_high(random_bits, upto[:, -1].astype(jnp.uint32)).astype(jnp.int32)
    index = jnp.zeros_like(target)
    for level in levels[-2::-1]:
        place, target = _locate(before, upto, target)
        index = index * CHUNK + place
        before, upto = _cumulated(chunk_of(split_chunks(level), index))
    here = (before <= target[:, None]) & (target[:, None] < upto)
    return index * CHUNK + lax.argmax(here, 1, jnp.int32)


def _cumulated(weights: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums of the weights before each, and up to each: int32[R, N] -> twice the same."""
    size = weights.shape[1]
    ids = lax.broadcasted_iota(jnp.int32, (1, size, size), 1)
    others = lax.broadcasted_iota(jnp.int32, (1, size, size), 2)
    row = weights[:, None, :]
    before, upto = sums(jnp.where(others < ids, row, 0), jnp.where(others <= ids, row, 0))
    return before, upto


def _locate(before: jax.Array, upto: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where the cumulated sums enclose the target, and what of the target is left for inside: int32[R]
    twice.
    """
    target = target[:, None]
    here = (before <= target) & (target < upto)
    ids = lax.broadcasted_iota(jnp.int32, before.shape, 1)
    place, left = sums(jnp.where(here, ids, 0), jnp.where(here, target - before, 0))
    return place, left
