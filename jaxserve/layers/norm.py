"""RMS norm, in float32 (``pallas_kernels.rms_norm``); the layers' weights are one array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.layers.params import LayerContext, StackedWeight
from pallas_kernels.rms_norm.dispatch import PLAIN


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """``RMSNorm`` where the order of its sums may follow the number of rows; ``LayerContext.rms_norm`` where not."""
    return PLAIN(x, weight, eps)


class StackedNormWeights(nnx.Module):
    """Weights of the norm that every layer has over M: one [L, M] array, since each array costs time at dispatch.

    Only for weights that meet nothing but the norm. XLA fuses a slice of a stacked array into its consumer,
    and where that is a large fusion, every layer becomes a kernel of its own to compile: stacked q/k norms
    made an H200 compile a Qwen3 of 28 layers in 19 s instead of 5.
    """

    def __init__(self, num_layers: int, size: int, context: LayerContext) -> None:
        self.weight = context.param((num_layers, size), ("layers", "embed"), scale=0.0, mean=1.0)

    def of(self, layer: int) -> jax.Array:
        """[M] of one layer."""
        return self.weight[layer]

    def stacked(self, layer: int) -> StackedWeight:
        """The same, uncut."""
        return StackedWeight(self.weight[...], jnp.full(1, layer, jnp.int32))
