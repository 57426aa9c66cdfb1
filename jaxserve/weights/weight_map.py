"""WeightSource: one checkpoint tensor and its place in a parameter. A list of them is all a loader needs."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from types import EllipsisType

import numpy as np

TILE = 128
"""Elements along each side of a transposed tile, about."""

Index = tuple[int | slice | EllipsisType, ...]


@dataclass(frozen=True)
class WeightSource:
    """``target.reshape(view)[index] = tensor.reshape(split).transpose(order)``, broadcast like numpy does.

    Args:
        name: the tensor's Hugging Face name (GGUF names are translated first).
        shape: its shape in the checkpoint.
        target: the parameter it is (a part of).
        view: how the parameter's elements are seen for the assignment.
        index: the part of that view it fills.
        split: how the tensor's own dimensions are split first; default: not.
        order: the permutation of the split tensor's dimensions; default: none.
    """

    name: str
    shape: tuple[int, ...]
    target: str
    view: tuple[int, ...]
    index: Index = (...,)
    split: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.split is not None and math.prod(self.split) != math.prod(self.shape):
            raise ValueError(f"{self.name}: split {self.split} does not hold shape {self.shape}")

    def place(self, target: np.ndarray, tensor: np.ndarray) -> None:
        """Write ``tensor`` into ``target``, which is contiguous and has the parameter's shape and dtype."""
        value = tensor if self.split is None else tensor.reshape(self.split)
        if self.order is not None:
            value = value.transpose(self.order)
        part = target.reshape(self.view)[self.index]
        if self.order is None or value.ndim < 2:
            part[...] = value
        else:
            _assign_transposed(part, np.broadcast_to(value, part.shape))


def _assign_transposed(target: np.ndarray, value: np.ndarray) -> None:
    """``target[...] = value`` in tiles that stay in the processor's cache: numpy alone is three times slower.

    The first axis of ``value`` is the contiguous one of the tensor it comes from.
    """
    steps, room = [TILE], 2 * TILE
    for size in reversed(value.shape[1:]):
        step = max(1, min(size, room))
        room //= step
        steps.insert(1, step)
    starts = (range(0, size, step) for size, step in zip(value.shape, steps, strict=True))
    for corner in itertools.product(*starts):
        tile = tuple(slice(start, start + step) for start, step in zip(corner, steps, strict=True))
        target[tile] = value[tile]
