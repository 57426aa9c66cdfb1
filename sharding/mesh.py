"""The device mesh: ``data`` splits the requests of a step, ``model`` splits layers; experts are split over both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

MESH_AXES = ("data", "model")


def make_mesh(
    tensor_parallel_size: int = 1, devices: Sequence[Any] | None = None, *, data_parallel_size: int = 1
) -> Mesh:
    """A mesh of shape (data_parallel_size, tensor_parallel_size) over the first devices.

    Args:
        tensor_parallel_size: devices over which each layer is split: neighbours in the order given.
        devices: candidates in order (a topology's for ahead-of-time compilation); default: all of the program's.
        data_parallel_size: groups of such devices, each with its own requests.

    Raises:
        ValueError: when there are fewer devices than that.
    """
    candidates = jax.devices() if devices is None else list(devices)
    shape = (data_parallel_size, tensor_parallel_size)
    num_devices = data_parallel_size * tensor_parallel_size
    if min(shape) < 1 or num_devices > len(candidates):
        raise ValueError(
            f"data_parallel_size {data_parallel_size} x tensor_parallel_size {tensor_parallel_size} is {num_devices}, "
            f"but {len(candidates)} device(s) are available"
        )
    grid = np.array(candidates[:num_devices], dtype=object).reshape(shape)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))
