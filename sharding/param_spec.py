"""ParamSpec: one declaration of a parameter, from which shape, sharding, dummy values and loading follow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from sharding.constraints import named_sharding
from sharding.rules import DEFAULT_RULES, ShardingRules


@dataclass(frozen=True)
class ParamSpec:
    """A parameter before it has a value.

    Args:
        shape: elements per dimension, as stored.
        dtype: element type as stored (a numpy dtype; bfloat16 is ml_dtypes').
        axes: the logical axis of each dimension; None is never split.
        init_scale: standard deviation of random values.
        init_mean: their mean (1 for norm weights).
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[str | None, ...]
    init_scale: float = 0.02
    init_mean: float = 0.0

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(
                f"axes {self.axes} do not name the {len(self.shape)} dimensions of shape {self.shape}"
            )

    @property
    def size_bytes(self) -> int:
        """Bytes of all shards together."""
        return math.prod(self.shape) * self.dtype.itemsize

    def abstract(
        self, mesh: Mesh | None = None, rules: ShardingRules = DEFAULT_RULES
    ) -> jax.ShapeDtypeStruct:
        """Shape, dtype and, on a mesh, sharding: what ``jit(...).lower`` and the loader take."""
        sharding = None if mesh is None else named_sharding(mesh, self.axes, rules)
        return jax.ShapeDtypeStruct(self.shape, self.dtype, sharding=sharding)
