"""Declaring parameters: an nnx.Param that carries its ParamSpec, and what every layer is built with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from pallas_kernels.dispatch import AttentionBackend
from sharding import DEFAULT_RULES, ParamSpec, ShardingRules, constrain


@dataclass(frozen=True)
class LayerContext:
    """What layers need beside the model's own config.

    Args:
        dtype: type of weights and activations.
        backend: attention over the paged cache.
        tensor_parallel_size: devices over which heads, feed-forward and vocabulary are split.
        mesh: where the step runs; None leaves placement to the arrays.
        rules: logical to mesh axes.
        scaled_kv_cache: cached keys and values are multiplied by scales of the checkpoint (float8).
        weight_first: few tokens are multiplied with the weight on the left, which is faster on CPUs.
    """

    dtype: np.dtype
    backend: AttentionBackend
    tensor_parallel_size: int = 1
    mesh: Mesh | None = None
    rules: ShardingRules = DEFAULT_RULES
    weight_first: bool = False
    scaled_kv_cache: bool = False

    def param(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        *,
        scale: float = 0.02,
        mean: float = 0.0,
        dtype: np.dtype | None = None,
    ) -> nnx.Param[jax.Array]:
        """Declare a parameter, in the compute type by default. It is abstract: ``Model`` binds an array to it."""
        spec = ParamSpec(shape, self.dtype if dtype is None else dtype, axes, scale, mean)
        return cast(nnx.Param[jax.Array], nnx.Param(spec.abstract(), spec=spec))

    def constrain(self, value: jax.Array, axes: tuple[str | None, ...]) -> jax.Array:
        """Tell the partitioner how an intermediate value is split."""
        return constrain(value, axes, self.mesh, self.rules)


def value_of(param: nnx.Param[jax.Array] | None) -> jax.Array | None:
    """The array of a parameter that a model may lack."""
    return None if param is None else param[...]
