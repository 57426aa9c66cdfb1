"""WeightSource: one checkpoint tensor and its place in a parameter. A list of them is all a loader needs."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from types import EllipsisType

import numpy as np

from jaxserve.weights.checkpoint import Checkpoint

Index = tuple[int | slice | EllipsisType, ...]


@dataclass(frozen=True)
class TensorPart:
    """A part of a larger checkpoint tensor, such as one expert's rows of all experts' weights.

    Args:
        name: the larger tensor's.
        shape: its shape.
        index: the part.
    """

    name: str
    shape: tuple[int, ...]
    index: Index


@dataclass(frozen=True)
class WeightSource:
    """``target.reshape(view)[index] = tensor.reshape(split).transpose(axes)``, broadcast like numpy does.

    Args:
        name: the tensor's Hugging Face name (GGUF names are translated first).
        shape: its shape in the checkpoint.
        target: the parameter it is (a part of).
        view: how the parameter's elements are seen for the assignment.
        index: the part of that view it fills.
        split: how the tensor's own dimensions are split first; default: not.
        aliases: further names under which checkpoints hold it.
        default: its value where the checkpoint lacks it; None: it must be there.
        axes: the order of the split dimensions in the view; default: as they are.
        within: where it lies in checkpoints that hold it as a part of a larger tensor instead.
    """

    name: str
    shape: tuple[int, ...]
    target: str
    view: tuple[int, ...]
    index: Index = (...,)
    split: tuple[int, ...] | None = None
    aliases: tuple[str, ...] = ()
    default: float | None = None
    axes: tuple[int, ...] | None = None
    within: TensorPart | None = None

    def __post_init__(self) -> None:
        if self.split is not None and math.prod(self.split) != math.prod(self.shape):
            raise ValueError(f"{self.name}: split {self.split} does not hold shape {self.shape}")

    def name_in(self, names: Container[str]) -> str | None:
        """The name by which a checkpoint with these ``names`` holds the tensor (or what it is part of), or None."""
        found = next((name for name in (self.name, *self.aliases) if name in names), None)
        if found is None and self.within is not None and self.within.name in names:
            return self.within.name
        return found

    def stored_shape(self, name: str) -> tuple[int, ...]:
        """The shape that the tensor of this name (``name_in``) must have."""
        return self.within.shape if self.within is not None and name == self.within.name else self.shape

    def read(self, checkpoint: Checkpoint, name: str) -> np.ndarray:
        """The tensor, from the one of this name (``name_in``): a view where that is one."""
        tensor = checkpoint.read(name)
        return tensor[self.within.index] if self.within is not None and name == self.within.name else tensor

    def place(self, target: np.ndarray, tensor: np.ndarray) -> None:
        """Write ``tensor`` into ``target``, which is contiguous and has the parameter's shape and dtype."""
        split = tensor if self.split is None else tensor.reshape(self.split)
        target.reshape(self.view)[self.index] = split if self.axes is None else split.transpose(self.axes)
