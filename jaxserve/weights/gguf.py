"""Reading GGUF files: metadata, the tensor table, and tensors dequantized through the ``gguf`` package.

The file's header is parsed here rather than by ``gguf.GGUFReader``, which takes seconds for a large
vocabulary. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.weights.mapped_pages import release_pages

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""GGUF value type to struct format."""
STRING, ARRAY = 8, 9
PLAIN_TYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
QUANTIZED_TYPES = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
HF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
HF_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
PERMUTED = re.compile(r"blk\.\d+\.attn_(q|k)\.(weight|bias)")
"""Tensors whose rows llama.cpp's converter reorders, in files of the ``llama`` architecture only."""


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor's shape (outermost first, as Hugging Face has it), type name, and byte range in the file."""

    shape: tuple[int, ...]
    type: str
    begin: int
    num_bytes: int


class GGUFFile:
    """One file: ``metadata`` (Python values) and ``tensors`` (the table), checked against its size."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}.") from error
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._parse()
        except (struct.error, UnicodeDecodeError, RecursionError, OverflowError) as error:
            raise CheckpointError(
                f"{path} is truncated or corrupt: its header cannot be read ({error})."
            ) from error

    def read(self, name: str) -> np.ndarray:
        """The tensor as float32, float16 or bfloat16; quantized ones come out as float32."""
        import gguf

        tensor = self.tensors[name]
        if tensor.type in PLAIN_TYPES:
            flat = np.frombuffer(self._map, PLAIN_TYPES[tensor.type], math.prod(tensor.shape), tensor.begin)
            return flat.reshape(tensor.shape)
        if tensor.type not in QUANTIZED_TYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name!r} has type {tensor.type}; readable are "
                f"{', '.join((*PLAIN_TYPES, *QUANTIZED_TYPES))}."
            )
        raw = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.begin)
        rows = raw.reshape(*tensor.shape[:-1], -1)
        return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[tensor.type]).reshape(tensor.shape)

    def release(self, view: np.ndarray) -> None:
        """Let go of the pages behind a view."""
        release_pages(self._map, view)

    def _parse(self) -> None:
        if self._map[:4] != b"GGUF":
            raise CheckpointError(f"{self.path} is no GGUF file: it begins with {self._map[:4]!r}.")
        version, num_tensors, num_values = struct.unpack_from("<IQQ", self._map, 4)
        if version not in (2, 3):
            raise CheckpointError(f"{self.path} is GGUF version {version}; versions 2 and 3 are readable.")
        cursor = _Cursor(self._map, 24)
        for _ in range(num_values):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.scalar("I"))
        table = [_read_tensor_entry(cursor, self.path) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(
                f"{self.path} is corrupt: general.alignment is {alignment!r}, no power of two."
            )
        data_start = -(-cursor.offset // alignment) * alignment
        for name, tensor in table:
            begin = data_start + tensor.begin
            if begin + tensor.num_bytes > len(self._map):
                raise CheckpointError(
                    f"{self.path} is truncated: tensor {name!r} ends at byte {begin + tensor.num_bytes}, "
                    f"the file at {len(self._map)}."
                )
            self.tensors[name] = GGUFTensor(tensor.shape, tensor.type, begin, tensor.num_bytes)


class _Cursor:
    """Sequential reads of GGUF's little-endian values."""

    def __init__(self, data: mmap.mmap, offset: int) -> None:
        self.data = data
        self.offset = offset

    def scalar(self, format: str) -> Any:
        (value,) = struct.unpack_from("<" + format, self.data, self.offset)
        self.offset += struct.calcsize(format)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        end = self.offset + length
        if end > len(self.data):
            raise struct.error(f"a string of {length} bytes at {self.offset} passes the end of the file")
        text = self.data[self.offset : end].decode("utf-8")
        self.offset = end
        return text

    def value(self, type: int) -> Any:
        if type == STRING:
            return self.string()
        if type == ARRAY:
            element, count = self.scalar("I"), self.scalar("Q")
            if count > len(self.data):
                raise struct.error(f"an array of {count} values passes the end of the file")
            if element in SCALARS:
                return self._scalars(SCALARS[element], count)
            return [self.value(element) for _ in range(count)]
        if type not in SCALARS:
            raise struct.error(f"value type {type} is unknown")
        return self.scalar(SCALARS[type])

    def _scalars(self, format: str, count: int) -> list[Any]:
        values = struct.unpack_from(f"<{count}{format}", self.data, self.offset)
        self.offset += struct.calcsize(f"<{count}{format}")
        return list(values)


def _read_tensor_entry(cursor: _Cursor, path: Path) -> tuple[str, GGUFTensor]:
    """One row of the tensor table; ``begin`` still counts from the start of the data."""
    import gguf

    name = cursor.string()
    num_dims = cursor.scalar("I")
    if num_dims > 8:
        raise struct.error(f"tensor {name!r} has {num_dims} dimensions")
    shape = tuple(cursor.scalar("Q") for _ in range(num_dims))[::-1]
    type_id, begin = cursor.scalar("I"), cursor.scalar("Q")
    try:
        type_name = gguf.GGMLQuantizationType(type_id).name
    except ValueError:
        raise CheckpointError(f"{path}: tensor {name!r} has the unknown type number {type_id}.") from None
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(type_id)]
    if not shape or shape[-1] % block:
        raise CheckpointError(
            f"{path} is corrupt: tensor {name!r} of shape {shape} is no whole number of {type_name} "
            "blocks a row."
        )
    return name, GGUFTensor(shape, type_name, begin, math.prod(shape) // block * block_bytes)


class GGUFCheckpoint:
    """A GGUF file's tensors under their Hugging Face names, rows in Hugging Face order."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self._gguf_names = {hf_name(name): name for name in self._file.tensors}
        metadata = self._file.metadata
        self._architecture = str(metadata.get("general.architecture"))
        heads = metadata.get(f"{self._architecture}.attention.head_count")
        kv_heads = metadata.get(f"{self._architecture}.attention.head_count_kv", heads)
        if not isinstance(heads, int) or not isinstance(kv_heads, int):
            raise CheckpointError(f"{path} has no number of heads: head_count is {heads!r}, {kv_heads!r}.")
        self._num_heads = {"q": heads, "k": kv_heads}

    def names(self) -> Collection[str]:
        return self._gguf_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.tensors[self._gguf_names[name]].shape

    def read(self, name: str) -> np.ndarray:
        gguf_name = self._gguf_names[name]
        tensor = self._file.read(gguf_name)
        match = PERMUTED.fullmatch(gguf_name)
        if match is None or self._architecture != "llama":
            return tensor
        return undo_rope_permutation(tensor, self._num_heads[match[1]])

    def read_bytes(self, name: str) -> int:
        gguf_name = self._gguf_names[name]
        kind = self._file.tensors[gguf_name].type
        elements = math.prod(self.shape(name))
        if kind not in PLAIN_TYPES:
            return elements * 4
        copied = PERMUTED.fullmatch(gguf_name) is not None and self._architecture == "llama"
        return elements * PLAIN_TYPES[kind].itemsize if copied else 0

    def release(self, view: np.ndarray) -> None:
        self._file.release(view)


def hf_name(gguf_name: str) -> str:
    """A GGUF tensor name in Hugging Face's words; unknown names stay as they are."""
    stem, _, suffix = gguf_name.rpartition(".")
    if stem in HF_NAMES:
        return f"{HF_NAMES[stem]}.{suffix}"
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if match and match[2] in HF_LAYER_NAMES:
        return f"model.layers.{match[1]}.{HF_LAYER_NAMES[match[2]]}.{suffix}"
    return gguf_name


def undo_rope_permutation(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp rotates elements (0, 1), (2, 3), …; Hugging Face rotates (0, D/2), (1, D/2 + 1), ….

    Its converter interleaves the halves of each head's rows accordingly; this puts them back.
    """
    half = tensor.shape[0] // num_heads // 2
    pairs = tensor.reshape(num_heads, half, 2, *tensor.shape[1:])
    return pairs.swapaxes(1, 2).reshape(tensor.shape)
