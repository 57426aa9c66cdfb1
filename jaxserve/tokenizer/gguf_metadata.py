"""Read the key/value metadata of a GGUF file without touching its tensors.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. The
``gguf`` package reads the same, but makes one numpy view per array element, which takes seconds for a large
vocabulary.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxserve.errors import CheckpointError

_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]


def read_gguf_metadata(path: Path, keep: Callable[[str], bool] = lambda _key: True) -> dict[str, Any]:
    """The metadata whose keys pass ``keep``, as plain Python values (arrays as lists).

    Raises:
        CheckpointError: the file is not GGUF, is big endian or of an unknown version, or ends too early.
    """
    with open(path, "rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError as error:
            raise CheckpointError(f"{path} is empty.") from error
        with data:
            try:
                return _Reader(data, path).read(keep)
            except (struct.error, IndexError, UnicodeDecodeError, OverflowError) as error:
                raise CheckpointError(
                    f"{path}: the GGUF metadata is truncated or corrupt ({error})."
                ) from error


class _Reader:
    """A cursor over the mapped file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._at = 0

    def read(self, keep: Callable[[str], bool]) -> dict[str, Any]:
        if self._data[:4] != b"GGUF":
            raise CheckpointError(f"{self._path} is not a GGUF file (it starts with {self._data[:4]!r}).")
        self._at = 4
        version = self._unpack(_U32)
        if version not in (2, 3):
            raise CheckpointError(
                f"{self._path}: GGUF version {version} is not supported (2 and 3, little endian, are)."
            )
        self._unpack(_U64)  # number of tensors
        num_entries = self._unpack(_U64)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string()
            kind = self._unpack(_U32)
            if keep(key):
                metadata[key] = self._value(kind)
            else:
                self._skip(kind)
        return metadata

    def _unpack(self, layout: struct.Struct) -> Any:
        value = layout.unpack_from(self._data, self._at)[0]
        self._at += layout.size
        return value

    def _string(self) -> str:
        start = self._at + 8
        end = start + self._unpack(_U64)
        self._check_end(end)
        self._at = end
        return self._data[start:end].decode("utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        return self._unpack(self._scalar(kind))

    def _array(self) -> list[Any]:
        kind = self._unpack(_U32)
        count = self._unpack(_U64)
        if kind == _STRING:
            return [self._string() for _ in range(count)]
        if kind == _ARRAY:
            return [self._array() for _ in range(count)]
        layout = self._scalar(kind)
        end = self._at + count * layout.size
        self._check_end(end)
        values = [value for (value,) in layout.iter_unpack(self._data[self._at : end])]
        self._at = end
        return values

    def _skip(self, kind: int) -> None:
        if kind == _STRING:
            self._skip_bytes(self._unpack(_U64))
        elif kind != _ARRAY:
            self._skip_bytes(self._scalar(kind).size)
        else:
            item, count = self._unpack(_U32), self._unpack(_U64)
            if item in (_STRING, _ARRAY):
                for _ in range(count):
                    self._skip(item)
            else:
                self._skip_bytes(count * self._scalar(item).size)

    def _skip_bytes(self, count: int) -> None:
        self._check_end(self._at + count)
        self._at += count

    def _scalar(self, kind: int) -> struct.Struct:
        layout = _SCALARS.get(kind)
        if layout is None:
            raise CheckpointError(f"{self._path}: unknown GGUF value type {kind}: the metadata is corrupt.")
        return layout

    def _check_end(self, end: int) -> None:
        if end > len(self._data):
            raise CheckpointError(
                f"{self._path}: the GGUF metadata points to byte {end}, but the file has {len(self._data)}: "
                "it is truncated or corrupt."
            )
