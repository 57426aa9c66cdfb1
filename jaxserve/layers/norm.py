"""RMS norm, in float32 (``pallas_kernels.rms_norm``); the layers' weights are one array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
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

    def apart(self) -> list[jax.Array]:
        """[M] of every layer, cut out by one kernel for all of them.

        A GPU's norm is one kernel for all layers then. With ``of`` it is one for each, as the place of the cut is part
        of it, and XLA compiles and times them all: a third of what compiling a step takes. So the places are numbers
        that the compiler does not see; it joins the cuts, as no norm takes one in.
        """
        places = jax.lax.optimization_barrier(tuple(np.int32(i) for i in range(self.weight.shape[0])))
        return [jax.lax.dynamic_index_in_dim(self.weight[...], place, keepdims=False) for place in places]

    def stacked(self, layer: int) -> StackedWeight:
        """The same, uncut."""
        return StackedWeight(self.weight[...], jnp.full(1, layer, jnp.int32))
