"""Random parameters straight on the devices, for any config: what ``--load-format dummy`` serves.

Values come from an integer hash of (seed, parameter, element), not from a counter-based generator: a few
operations an element, no communication between shards, and the same values however the parameter is split.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding

from sharding import DEFAULT_RULES, ParamSpec, ShardingRules


def dummy_params(
    specs: Mapping[str, ParamSpec],
    *,
    seed: int = 0,
    mesh: Mesh | None = None,
    rules: ShardingRules = DEFAULT_RULES,
) -> dict[str, jax.Array]:
    """Random values of each spec's mean and standard deviation (uniform), in its dtype and sharding."""
    params: dict[str, jax.Array] = {}
    for name, spec in specs.items():
        fill = _filler(
            spec.shape, spec.dtype, spec.init_mean, spec.init_scale, spec.abstract(mesh, rules).sharding
        )
        params[name] = fill(np.uint32(zlib.crc32(f"{seed}/{name}".encode())))
    return params


@functools.lru_cache(maxsize=64)
def _filler(shape: tuple[int, ...], dtype: np.dtype, mean: float, scale: float, sharding: Sharding | None):
    """One compiled function for all parameters of a shape: seed to values."""

    def fill(seed: jax.Array) -> jax.Array:
        if scale == 0.0:
            return jnp.full(shape, mean, dtype)
        bits = _hash(_element_numbers(shape) ^ _hash(seed))
        unit = (bits >> 8).astype(jnp.float32) * (2.0**-23) - 1.0  # [-1, 1)
        return (mean + unit * (scale * 3.0**0.5)).astype(dtype)

    return jax.jit(fill, out_shardings=sharding)


def _element_numbers(shape: tuple[int, ...]) -> jax.Array:
    """Row-major number of each element, modulo 2 ** 32."""
    number = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        number += jax.lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(stride % 2**32)
        stride *= shape[axis]
    return number


def _hash(x: jax.Array) -> jax.Array:
    """A 32-bit integer hash: xor-shift-multiply with the constants of C. Wellons' ``lowbias32``."""
    x = x ^ (x >> 16)
    x = x * np.uint32(0x7FEB352D)
    x = x ^ (x >> 15)
    x = x * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
