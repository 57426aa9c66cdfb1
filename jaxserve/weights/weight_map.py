"""WeightSource: one checkpoint tensor and its place in a parameter. A list of them is all a loader needs."""

from __future__ import annotations

import math
from collections.abc import Container
from dataclasses import dataclass
from types import EllipsisType

import numpy as np

Index = tuple[int | slice | EllipsisType, ...]


@dataclass(frozen=True)
class WeightSource:
    """``target.reshape(view)[index] = tensor.reshape(split)``, broadcast like numpy does.

    Args:
        name: the tensor's Hugging Face name (GGUF names are translated first).
        shape: its shape in the checkpoint.
        target: the parameter it is (a part of).
        view: how the parameter's elements are seen for the assignment.
        index: the part of that view it fills.
        split: how the tensor's own dimensions are split first; default: not.
        aliases: further names under which checkpoints hold it.
        default: its value where the checkpoint lacks it; None: it must be there.
    """

    name: str
    shape: tuple[int, ...]
    target: str
    view: tuple[int, ...]
    index: Index = (...,)
    split: tuple[int, ...] | None = None
    aliases: tuple[str, ...] = ()
    default: float | None = None

    def __post_init__(self) -> None:
        if self.split is not None and math.prod(self.split) != math.prod(self.shape):
            raise ValueError(f"{self.name}: split {self.split} does not hold shape {self.shape}")

    def name_in(self, names: Container[str]) -> str | None:
        """The name by which a checkpoint with these ``names`` holds the tensor, or None."""
        return next((name for name in (self.name, *self.aliases) if name in names), None)

    def place(self, target: np.ndarray, tensor: np.ndarray) -> None:
        """Write ``tensor`` into ``target``, which is contiguous and has the parameter's shape and dtype."""
        target.reshape(self.view)[self.index] = tensor if self.split is None else tensor.reshape(self.split)
