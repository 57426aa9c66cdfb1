"""The device mesh: axes ``data``, ``model`` and ``expert``, of which tensor parallelism uses ``model``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

MESH_AXES = ("data", "model", "expert")


def make_mesh(tensor_parallel_size: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of shape (1, tensor_parallel_size, 1) over the first devices.

    Args:
        tensor_parallel_size: devices over which each layer is split.
        devices: candidates in order (a topology's for ahead-of-time compilation); default: this process's.

    Raises:
        ValueError: when there are fewer devices than that.
    """
    candidates = jax.devices() if devices is None else list(devices)
    if not 1 <= tensor_parallel_size <= len(candidates):
        raise ValueError(
            f"tensor_parallel_size is {tensor_parallel_size}, but {len(candidates)} device(s) are available"
        )
    grid = np.array(candidates[:tensor_parallel_size], dtype=object).reshape(1, tensor_parallel_size, 1)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
