"""MXFP4 tensors of a checkpoint: exact values, gpt-oss's shape, broken ones refused."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxserve.errors import CheckpointError
from jaxserve.weights.mxfp4 import dequantize
from jaxserve.weights.safetensors import SafetensorsCheckpoint


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """uint8 and float32 tensors as one safetensors file."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        kind = {"uint8": "U8", "float32": "F32"}[tensor.dtype.name]
        end = offset + tensor.nbytes
        header[name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    path.write_bytes(
        len(encoded).to_bytes(8, "little") + encoded + b"".join(t.tobytes() for t in tensors.values())
    )


def test_every_code_and_the_range_of_scales() -> None:
    codes = np.arange(16, dtype=np.uint8)
    block = (codes[0::2] | codes[1::2] << 4).repeat(2).reshape(8, 2).T.reshape(1, 1, 1, 16)
    plain = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    expected = np.tile(np.concatenate([plain, -plain]), 2)
    for scale in (127, 126, 130, 1, 250):
        values = dequantize(block, np.full((1, 1, 1), scale, np.uint8))
        assert values.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(values[0, 0].astype(np.float64), expected * 2.0 ** (scale - 127))


def test_a_checkpoint_shows_the_tensor_as_unquantized(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    blocks = random.randint(0, 256, (3, 10, 2, 16)).astype(np.uint8)
    scales = random.randint(120, 130, (3, 10, 2)).astype(np.uint8)
    bias = np.ones(4, np.float32)
    write(tmp_path / "model.safetensors", {"w_blocks": blocks, "w_scales": scales, "w_bias": bias})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert set(checkpoint.names()) == {"w", "w_bias"}
    assert checkpoint.shape("w") == (3, 64, 10)
    found = checkpoint.read("w")
    assert found.shape == (3, 64, 10)
    # Block 1 of row 7 of expert 2: its byte 5 holds elements 10 (low half) and 11.
    code, scale = blocks[2, 7, 1, 5], 2.0 ** (int(scales[2, 7, 1]) - 127)
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    for element, half in ((42, code & 15), (43, code >> 4)):
        expected = magnitudes[half & 7] * (-1 if half & 8 else 1) * scale
        assert float(found[2, element, 7]) == expected


def test_broken_shapes(tmp_path: Path) -> None:
    blocks, scales = np.zeros((1, 4, 2, 16), np.uint8), np.zeros((1, 4, 3), np.uint8)
    write(tmp_path / "model.safetensors", {"w_blocks": blocks, "w_scales": scales})
    with pytest.raises(CheckpointError, match=r"w_blocks of shape \(1, 4, 2, 16\) and w_scales"):
        SafetensorsCheckpoint(tmp_path).read("w")
