"""RMS norm (Zhang and Sennrich, 2019), in float32; its weights for all layers are one array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.layers.params import LayerContext


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Scale the last axis to unit root mean square, then by ``weight``.

    As the published models do, the normalised value is rounded to x's type before it meets the weight.
    """
    wide = x.astype(jnp.float32)
    normal = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normal.astype(x.dtype) * weight


class StackedRMSNorm(nnx.Module):
    """The same norm of every layer. One [L, ...] array instead of L: each array costs time at dispatch."""

    def __init__(self, shape: tuple[int, ...], eps: float, context: LayerContext) -> None:
        axes = ("layers",) + (None,) * (len(shape) - 1)
        self.weight = context.param(shape, axes, scale=0.0, mean=1.0)
        self.eps = eps

    def __call__(self, x: jax.Array, layer: int) -> jax.Array:
        return rms_norm(x, self.weight[layer], self.eps)
