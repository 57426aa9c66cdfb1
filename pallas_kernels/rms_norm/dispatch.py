"""Choosing how a norm adds its squares up: as XLA likes, or in one order for all numbers of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from pallas_kernels.hopper import hopper_why_not


class RMSNorm(Protocol):
    """RMS norm (Zhang and Sennrich, 2019) over the last axis, in float32. Stateless: a static part of the model."""

    name: str

    def __call__(self, x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
        """Scale the last axis to unit root mean square, then by ``weight``.

        As the published models do, the normalised value is rounded to x's type before it meets the weight.

        Args:
            x: [..., M].
            weight: [M], or of a shape that broadcasts.
            eps: added to the mean square.
        """
        ...


@dataclass(frozen=True)
class PlainNorm:
    """XLA's own sum: fast, in an order that follows the number of rows."""

    name = "plain"

    def __call__(self, x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
        wide = x.astype(jnp.float32)
        return _scaled(x, wide, jnp.mean(wide * wide, axis=-1, keepdims=True), weight, eps)


@dataclass(frozen=True)
class OnesNorm:
    """A product with ones, which on CPUs adds up alike for any number of rows from two on."""

    name = "ones"

    def __call__(self, x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
        wide, size = x.astype(jnp.float32), x.shape[-1]
        squares, ones = (wide * wide).reshape(-1, size), jnp.ones((8, size), jnp.float32)
        sums = jnp.einsum("tm,nm->tn", squares, ones, precision=jax.lax.Precision.HIGHEST)
        return _scaled(x, wide, sums[:, :1].reshape(*x.shape[:-1], 1) / size, weight, eps)


HALVINGS = 6
"""Additions that one thread does in a row: each doubles the values it reads."""


@dataclass(frozen=True)
class HalvesNorm:
    """Halves added to each other until one is left: single additions, whose order no compiler chooses.

    The square of a bfloat16 or float16 is exact in float32, so neither does it matter whether a product and a sum
    become one instruction. Sums are kept every few halvings, lest each thread do them all again.
    """

    name = "halves"

    def __call__(self, x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
        wide = x.astype(jnp.float32)
        return _scaled(x, wide, halved(wide * wide) / x.shape[-1], weight, eps)


def halved(sums: jax.Array) -> jax.Array:
    """Sums over the last axis, kept as an axis of one: its second half added to its first one until one is left."""
    for turn in range(1, (sums.shape[-1] - 1).bit_length() + 1):
        half, odd = divmod(sums.shape[-1], 2)
        kept = sums[..., 2 * half :]
        sums = sums[..., :half] + sums[..., half : 2 * half]
        if odd:
            sums = jnp.concatenate([sums, kept], axis=-1)
        if turn % HALVINGS == 0 or sums.shape[-1] == 1:
            sums = jax.lax.optimization_barrier(sums)
    return sums


@dataclass(frozen=True)
class FittingNorm:
    """A kernel for whole rows of the residual stream, and halves for what it does not take."""

    kernel: Any
    """With ``why_not(size, dtype)``."""

    name = "kernel"

    def __call__(self, x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
        if x.ndim == 2 and weight.ndim == 1 and self.kernel.why_not(x.shape[1], x.dtype) is None:
            return self.kernel(x, weight, eps)
        return HalvesNorm()(x, weight, eps)


PLAIN = PlainNorm()


class AddNorm(Protocol):
    """The sum of two, rounded to their type, and its norm, in one kernel. Stateless: a static part of the model."""

    def why_not(self, num_rows: int, size: int, dtype: Any) -> str | None:
        """Why so many rows of ``size`` elements are left to XLA; None: they are not."""
        ...

    def __call__(
        self, partial: jax.Array, residual: jax.Array, weights: jax.Array, layer: jax.Array, eps: float
    ) -> tuple[jax.Array, jax.Array]:
        """(sum, norm) of two [T, M], what ``PlainNorm`` makes of it but for the order of sums.

        Args:
            partial, residual: the two.
            weights: [L, M], of norms.
            layer: int32[1], which of them.
            eps: added to the mean square.
        """
        ...


def add_norm_of(platform: str) -> AddNorm | None:
    """The kernel of ``cpu``, ``gpu`` or ``tpu``; None where XLA does it."""
    if platform != "gpu" or hopper_why_not("the Hopper norm") is not None:
        return None
    from pallas_kernels.rms_norm.gpu import GpuAddNorm

    return GpuAddNorm()


def fixed_norm(platform: str, num_sms: int | None = None, *, kernel: bool = True) -> RMSNorm:
    """The norm whose bits do not depend on the number of rows.

    Args:
        platform: ``cpu``, ``tpu`` or ``gpu``: one that runs the Hopper kernels.
        num_sms: multiprocessors of a GPU; None asks the first one.
        kernel: use the device's, where it has one.
    """
    if platform == "cpu":
        return OnesNorm()
    if platform == "gpu" and kernel:
        from pallas_kernels.rms_norm.gpu import GpuRMSNorm

        return FittingNorm(GpuRMSNorm(num_sms))
    return HalvesNorm()


def _scaled(x: jax.Array, wide: jax.Array, mean: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return (wide * jax.lax.rsqrt(mean + eps)).astype(x.dtype) * weight
