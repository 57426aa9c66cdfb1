"""RMS norm (Zhang and Sennrich, 2019), in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Scale the last axis to unit root mean square, then by ``weight``.

    As the published models do, the normalised value is rounded to x's type before it meets the weight.
    """
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normal.astype(x.dtype) * weight
