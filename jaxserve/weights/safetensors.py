"""Reading safetensors folders through a memory map, bfloat16 included, one tensor at a time.

Format: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, data_offsets), then the
data. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.weights import mxfp4
from jaxserve.weights.mapped_pages import release_pages

DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit; a larger value means that this is no safetensors file."""


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies: byte range in the file, type name as the file spells it, shape."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """One file: its header, validated against the file's size, and a read-only map of its data."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                if size < 8:
                    raise CheckpointError(f"{path} is truncated: {size} bytes are no safetensors file.")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
        self.entries = _read_header(path, self._map, size)

    def read(self, name: str, dtypes: Mapping[str, np.dtype[Any]] = DTYPES) -> np.ndarray:
        """A read-only view of the tensor, whose type must be one of ``dtypes``."""
        entry = self.entries[name]
        dtype = dtypes.get(entry.dtype)
        if dtype is None:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has type {entry.dtype}; readable are {', '.join(dtypes)}."
            )
        expected = math.prod(entry.shape) * dtype.itemsize
        if entry.end - entry.begin != expected:
            raise CheckpointError(
                f"{self.path} is corrupt: tensor {name!r} of shape {entry.shape} and type {entry.dtype} "
                f"needs {expected} bytes, the file has {entry.end - entry.begin}."
            )
        flat = np.frombuffer(self._map, dtype, math.prod(entry.shape), entry.begin)
        return flat.reshape(entry.shape)

    def release(self, view: np.ndarray) -> bool:
        """Let go of the pages behind ``view``; whether it is of this file."""
        return release_pages(self._map, view)


def _read_header(path: Path, data: mmap.mmap, size: int) -> dict[str, TensorEntry]:
    (length,) = struct.unpack("<Q", data[:8])
    if length > MAX_HEADER_BYTES:
        raise CheckpointError(f"{path} is corrupt: a header of {length} bytes is no safetensors header.")
    start = 8 + length
    if start > size:
        raise CheckpointError(f"{path} is truncated: its header ends at byte {start}, the file at {size}.")
    try:
        header = json.loads(data[8:start])
        entries = {
            name: TensorEntry(
                str(entry["dtype"]),
                tuple(int(n) for n in entry["shape"]),
                start + int(entry["data_offsets"][0]),
                start + int(entry["data_offsets"][1]),
            )
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise CheckpointError(f"{path} is corrupt: its header cannot be read ({error!r}).") from error
    for name, entry in entries.items():
        if not start <= entry.begin <= entry.end or any(n < 0 for n in entry.shape):
            raise CheckpointError(
                f"{path} is corrupt: tensor {name!r} claims bytes {entry.begin} to {entry.end}."
            )
        if entry.end > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {name!r} ends at byte {entry.end}, the file at {size}."
            )
    return entries


class SafetensorsCheckpoint:
    """All safetensors files of a folder, through ``model.safetensors.index.json`` where there is one.

    An MXFP4 tensor, stored as ``NAME_blocks`` [E, N, G, 16] and ``NAME_scales`` [E, N, G], goes by ``NAME`` and has the
    shape [E, 32 G, N], inputs first, that gpt-oss gives the unquantized tensor of this name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, SafetensorsFile] = {}
        self._all = [SafetensorsFile(path) for path in checkpoint_files(folder)]
        for file in self._all:
            self._files.update(dict.fromkeys(file.entries, file))
        stems = (name.removesuffix("_blocks") for name in self._files if name.endswith("_blocks"))
        self._packed = {stem for stem in stems if f"{stem}_scales" in self._files and stem not in self._files}
        packed_files = {f"{stem}_{part}" for stem in self._packed for part in ("blocks", "scales")}
        self._names = (self._files.keys() - packed_files) | self._packed

    def names(self) -> Collection[str]:
        return self._names

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._packed:
            return self._files[name].entries[name].shape
        blocks, scales = (self._stored_shape(f"{name}_{part}") for part in ("blocks", "scales"))
        if len(blocks) != 4 or blocks[3] != mxfp4.BLOCK_BYTES or blocks[:3] != scales:
            raise CheckpointError(
                f"{self.folder}: {name}_blocks of shape {blocks} and {name}_scales of shape {scales} are no MXFP4 "
                "tensor."
            )
        return (blocks[0], blocks[2] * 2 * mxfp4.BLOCK_BYTES, blocks[1])

    def read(self, name: str) -> np.ndarray:
        if name not in self._packed:
            return self._files[name].read(name)
        self.shape(name)  # checks it
        return mxfp4.dequantize(self._bytes(f"{name}_blocks"), self._bytes(f"{name}_scales")).swapaxes(1, 2)

    def read_bytes(self, name: str) -> int:
        return 2 * math.prod(self.shape(name)) if name in self._packed else 0

    def release(self, view: np.ndarray) -> None:
        any(file.release(view) for file in self._all)

    def _stored_shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].entries[name].shape

    def _bytes(self, name: str) -> np.ndarray:
        return self._files[name].read(name, {"U8": np.dtype(np.uint8)})


def checkpoint_files(folder: Path) -> list[Path]:
    """The files that hold a folder's checkpoint.

    Raises:
        CheckpointError: none is there, or the index names one that is not.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        return _indexed_files(folder, index)
    if single.is_file():
        return [single]
    others = sorted(
        p for p in folder.glob("*.safetensors") if not p.name.startswith(("consolidated", "adapter"))
    )
    if others:
        return others
    pickled = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
    if pickled:
        raise CheckpointError(
            f"{folder} holds pickled weights ({pickled[0]}), which can run code when opened and are "
            "refused. Convert them once with transformers: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)."
        )
    raise CheckpointError(
        f"{folder} holds no .safetensors file, the only kind of weights read from a folder."
    )


def _indexed_files(folder: Path, index: Path) -> list[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()), key=str)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index} is corrupt: {error!r}.") from error
    if not names:
        raise CheckpointError(f"{index} is corrupt: it names no file.")
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index} names {name!r}, which is not a file of that folder.")
        if not (folder / name).is_file():
            raise CheckpointError(f"{index} names {name!r}, which is missing from {folder}.")
    return [folder / name for name in names]
