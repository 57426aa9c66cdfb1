"""safetensors folders: types, indexes, and every way in which a file can be broken."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoints import random_tensors, tiny_config, write_safetensors, write_sharded_safetensors

from jaxserve.errors import CheckpointError
from jaxserve.weights.safetensors import SafetensorsCheckpoint, SafetensorsFile

TENSORS = random_tensors(tiny_config("llama"))
NAME = "model.layers.1.mlp.up_proj.weight"


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)
    return path


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_types(tmp_path: Path, dtype: str) -> None:
    write_safetensors(tmp_path / "model.safetensors", TENSORS, dtype)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert set(checkpoint.names()) == set(TENSORS)
    found = checkpoint.read(NAME)
    element = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    assert found.dtype == element
    assert found.shape == checkpoint.shape(NAME) == TENSORS[NAME].shape
    np.testing.assert_array_equal(found, TENSORS[NAME].astype(element))


def test_agrees_with_the_safetensors_package(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file(TENSORS, tmp_path / "model.safetensors", metadata={"format": "pt"})
    checkpoint = SafetensorsCheckpoint(tmp_path)
    for name in TENSORS:
        np.testing.assert_array_equal(checkpoint.read(name), TENSORS[name])


def test_reading_makes_no_copy(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", TENSORS)
    tensor = SafetensorsCheckpoint(tmp_path).read(NAME)
    assert not tensor.flags.owndata
    assert not tensor.flags.writeable


def test_several_files_with_an_index(tmp_path: Path) -> None:
    write_sharded_safetensors(tmp_path, TENSORS, 3)
    (tmp_path / "stray.safetensors").write_bytes(b"not in the index, never opened")
    checkpoint = SafetensorsCheckpoint(tmp_path)
    assert set(checkpoint.names()) == set(TENSORS)
    np.testing.assert_array_equal(checkpoint.read(NAME), TENSORS[NAME])


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    write_sharded_safetensors(tmp_path, TENSORS, 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"names 'model-00002-of-00003.safetensors', which is missing"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": 3}']
)
def test_a_broken_index_is_reported(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"index.json is corrupt"):
        SafetensorsCheckpoint(tmp_path)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", 5])
def test_an_index_cannot_leave_the_folder(tmp_path: Path, name: object) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match=r"not a file of that folder|is corrupt"):
        SafetensorsCheckpoint(tmp_path)


def test_every_truncation_is_reported(tmp_path: Path) -> None:
    whole = tmp_path / "whole.safetensors"
    write_safetensors(whole, {"a": np.ones((3, 5), np.float32), "b": np.ones(7, np.float32)})
    data = whole.read_bytes()
    cut = tmp_path / "cut.safetensors"
    for length in range(len(data)):
        cut.write_bytes(data[:length])
        with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
            SafetensorsFile(cut)


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b"\xff\xfe",
        [],
        {"a": 5},
        {"a": {"dtype": "F32", "shape": [2]}},
        {"a": {"dtype": "F32", "shape": "xy", "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [-4, 4]}},
    ],
)
def test_broken_headers_are_reported(tmp_path: Path, header: object) -> None:
    path = write_raw(tmp_path / "a.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=r"a.safetensors is (corrupt|truncated)"):
        SafetensorsFile(path)


def test_a_size_that_contradicts_the_shape_is_reported(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}
    file = SafetensorsFile(write_raw(tmp_path / "a.safetensors", header, bytes(8)))
    with pytest.raises(CheckpointError, match=r"needs 12 bytes, the file has 8"):
        file.read("a")


def test_an_unreadable_type_is_named(tmp_path: Path) -> None:
    header = {"a": {"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}}
    file = SafetensorsFile(write_raw(tmp_path / "a.safetensors", header, bytes(8)))
    with pytest.raises(
        CheckpointError, match=r"tensor 'a' has type F8_E4M3; readable are F64, F32, F16, BF16"
    ):
        file.read("a")


def test_pickled_weights_are_refused_with_advice(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin.*refused.*save_pretrained"):
        SafetensorsCheckpoint(tmp_path)


def test_an_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no .safetensors file"):
        SafetensorsCheckpoint(tmp_path)
