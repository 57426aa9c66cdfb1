"""Checkpoint: named tensors on disk, read one at a time, whatever the file format."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import numpy as np

from jaxserve.errors import CheckpointError


class Checkpoint(Protocol):
    """Tensors by Hugging Face name. Most are views of the mapped file: the pages that are touched cost memory."""

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape without reading; KeyError for an unknown name."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor in a float type: a read-only view of the file, or dequantized.

        Raises:
            CheckpointError: a type that cannot be read, or data that ends early.
        """
        ...

    def read_bytes(self, name: str) -> int:
        """Bytes of the array that ``read`` makes; 0 for a view of the file."""
        ...

    def release(self, view: np.ndarray) -> None:
        """Let go of the memory behind a view of the file. It stays readable, from the file again."""
        ...


def open_checkpoint(path: Path, format: str) -> Checkpoint:
    """Open a ``ModelFiles.path``: a folder of safetensors (``hf``) or a ``gguf`` file.

    Raises:
        CheckpointError: nothing readable there, or a broken file.
    """
    from jaxserve.weights.gguf import GGUFCheckpoint
    from jaxserve.weights.safetensors import SafetensorsCheckpoint

    if format == "gguf":
        return GGUFCheckpoint(path)
    if format == "hf":
        return SafetensorsCheckpoint(path)
    raise CheckpointError(f"unknown checkpoint format {format!r} of {path}")
