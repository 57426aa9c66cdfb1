"""Tokenizers built from GGUF metadata: SmolLM2's real one against stored ids, small ones in every detail."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFValueType, GGUFWriter
from tokenizers import pre_tokenizers

from jaxserve.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from jaxserve.tokenizer.fast_tokenizer import FastTokenizer
from jaxserve.tokenizer.gguf_metadata import read_gguf_metadata
from jaxserve.tokenizer.gguf_tokenizer import PRE_TOKENIZERS
from jaxserve.tokenizer.load import load_tokenizer, resolve_eos_token_ids

STORED: list[tuple[str, list[int]]] = [
    (text, ids)
    for text, ids in json.loads((Path(__file__).parent / "fixtures" / "smollm2_tokens.json").read_text())
]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def write(path: Path, entries: dict[str, Any]) -> Path:
    """A GGUF file with these ``tokenizer.`` entries and nothing else."""
    writer = GGUFWriter(path, "llama")
    for key, value in entries.items():
        kind = None
        if isinstance(value, bool):
            kind = GGUFValueType.BOOL
        elif isinstance(value, int):
            kind = GGUFValueType.UINT32
        if isinstance(value, list):
            writer.add_array(f"tokenizer.{key}", value)
        else:
            writer.add_key_value(f"tokenizer.{key}", value, kind or GGUFValueType.STRING)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_entries(**changes: Any) -> dict[str, Any]:
    tokens = [*ALPHABET, "ab", "12", "123", "Ġ1", "<bos>", "<eos>", "<eot>", "<think>", "Ġab"]
    types = [1] * (len(ALPHABET) + 4) + [3, 3, 3, 4, 1]
    first = len(ALPHABET)
    return {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.merges": ["a b", "Ġ 1", "1 2", "12 3"],
        "ggml.bos_token_id": first + 4,
        "ggml.eos_token_id": first + 5,
        "ggml.eot_token_id": first + 6,
        "chat_template": "default one",
        **{key: value for key, value in changes.items() if value is not None},
    }


def spm_entries(**changes: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types, scores = [2, 3, 3] + [6] * 256, [0.0] * 259
    for rank, token in enumerate(["▁a", "ab", "▁ab", "▁", "a", "b", "c"]):
        tokens.append(token)
        types.append(1)
        scores.append(-float(rank))
    return {
        "ggml.model": "llama",
        "ggml.tokens": tokens,
        "ggml.token_type": types,
        "ggml.scores": scores,
        "ggml.bos_token_id": 1,
        "ggml.eos_token_id": 2,
        "ggml.unknown_token_id": 0,
        **changes,
    }


def tokens_of(tokenizer: FastTokenizer, text: str, **kwargs: Any) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, **kwargs))


# --- SmolLM2 -----------------------------------------------------------------------------------------------


def test_smollm2_encodes_as_stored(smollm2: FastTokenizer):
    assert len(STORED) > 150
    wrong = {text: smollm2.encode(text) for text, ids in STORED if smollm2.encode(text) != ids}
    assert not wrong


def test_smollm2_decodes_what_it_encoded(smollm2: FastTokenizer):
    for text, ids in STORED:
        assert smollm2.decode(ids, skip_special_tokens=False) == smollm2.backend.decode(
            ids, skip_special_tokens=False
        )
        assert smollm2.decode(ids) == smollm2.backend.decode(ids)
        if text.isascii() and not any(ord(character) < 9 for character in text):
            assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_smollm2_s_facts(smollm2: FastTokenizer):
    assert smollm2.vocab_size == 49152
    assert (smollm2.bos_token_id, smollm2.eos_token_id, smollm2.pad_token_id) == (1, 2, 2)
    assert smollm2.special_token_ids == frozenset(range(17))
    assert smollm2.special_tokens_map["eos_token"] == "<|im_end|>"
    assert smollm2.chat_template is not None
    assert "SmolLM" in smollm2.chat_template
    assert resolve_eos_token_ids(smollm2, {}, {}) == [2]


def test_transformers_agrees_once_it_splits_digits(smollm2: FastTokenizer, smollm2_path: Path):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    for text, ids in STORED:
        assert theirs.encode(text) == smollm2.encode(text) == ids


# --- byte-level --------------------------------------------------------------------------------------------


def test_byte_level_in_full(tmp_path: Path):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", byte_level_entries()))
    assert tokens_of(tokenizer, "ab ab<eos> 123") == ["ab", "Ġ", "ab", "<eos>", "Ġ1", "2", "3"]
    assert tokenizer.chat_template == "default one"
    first = len(ALPHABET)
    assert tokenizer.eos_token_ids == [first + 5, first + 6], "end of sequence and end of turn"
    assert tokenizer.special_token_ids == {first + 4, first + 5, first + 6}
    ids = tokenizer.encode("<think>ab<eot>")
    assert ids == [first + 7, first, first + 6]
    assert tokenizer.decode(ids) == "<think>ab"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["123", "1", "Ġ1", "2", "3"]),
        ("smollm", ["1", "2", "3", "1", "Ġ", "1", "2", "3"]),
        ("llama-bpe", ["<bos>", "123", "1", "Ġ", "123"]),
        ("qwen2", ["1", "2", "3", "1", "Ġ", "1", "2", "3"]),
        ("default", ["123", "1", "Ġ", "123"]),
    ],
)
def test_the_pre_tokenizer_decides_how_digits_are_cut(tmp_path: Path, pre: str, expected: list[str]):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", byte_level_entries(**{"ggml.pre": pre})))
    assert tokens_of(tokenizer, "1231 123") == expected


def test_whole_tokens_win_over_merges_where_the_model_was_trained_so(tmp_path: Path):
    gpt2 = load_tokenizer(write(tmp_path / "a.gguf", byte_level_entries()))
    llama = load_tokenizer(write(tmp_path / "b.gguf", byte_level_entries(**{"ggml.pre": "llama-bpe"})))
    assert tokens_of(gpt2, " ab") == ["Ġ", "ab"]
    assert tokens_of(llama, " ab", add_special_tokens=False) == ["Ġab"]


def test_qwen2_composes_characters_first(tmp_path: Path):
    qwen2 = load_tokenizer(write(tmp_path / "m.gguf", byte_level_entries(**{"ggml.pre": "qwen2"})))
    assert qwen2.encode("e\u0301") == qwen2.encode("é")


@pytest.mark.parametrize(("add_bos", "expected"), [(None, ["a"]), (True, ["<bos>", "a"]), (False, ["a"])])
def test_bos_and_eos_are_added_as_the_file_says(tmp_path: Path, add_bos: bool | None, expected: list[str]):
    entries = byte_level_entries(**{"ggml.add_bos_token": add_bos})
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", entries))
    assert tokens_of(tokenizer, "a") == expected
    assert tokens_of(tokenizer, "a", add_special_tokens=False) == ["a"]
    both = load_tokenizer(write(tmp_path / "n.gguf", {**entries, "ggml.add_eos_token": True}))
    assert tokens_of(both, "a") == [*expected, "<eos>"]


def test_named_chat_templates(tmp_path: Path):
    entries = byte_level_entries(**{"chat_template.tool_use": "with tools"})
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", entries))
    assert tokenizer.chat_templates == {"default": "default one", "tool_use": "with tools"}


def test_every_known_pre_tokenizer_builds(tmp_path: Path):
    for name in PRE_TOKENIZERS:
        entries = byte_level_entries(**{"ggml.pre": name, "ggml.add_bos_token": False})
        tokenizer = load_tokenizer(write(tmp_path / f"{name}.gguf", entries))
        text = "It's 1,234 “quoted” words…\n\n  <b>你好</b> 👋🏽"
        assert tokenizer.decode(tokenizer.encode(text)) == text


# --- SentencePiece -----------------------------------------------------------------------------------------


def test_sentencepiece_in_full(tmp_path: Path):
    tokenizer = load_tokenizer(write(tmp_path / "m.gguf", spm_entries()))
    assert tokens_of(tokenizer, "ab c é") == ["<s>", "▁ab", "▁", "c", "▁", "<0xC3>", "<0xA9>"]
    assert tokens_of(tokenizer, "b</s>a") == ["<s>", "▁", "b", "</s>", "▁a"]
    assert tokenizer.decode(tokenizer.encode("ab c é")) == "ab c é"
    bare = load_tokenizer(
        write(
            tmp_path / "n.gguf", spm_entries(**{"ggml.add_space_prefix": False, "ggml.add_bos_token": False})
        )
    )
    assert tokens_of(bare, "ab ab") == ["ab", "▁ab"]
    assert bare.decode(bare.encode(" ab")) == " ab"


def test_better_scores_merge_first(tmp_path: Path):
    entries = spm_entries()
    assert tokens_of(load_tokenizer(write(tmp_path / "m.gguf", entries)), "ab")[1:] == ["▁ab"]
    without = dict(entries)
    tokens: list[str] = without["ggml.tokens"]
    without["ggml.tokens"] = ["▁zz" if token == "▁ab" else token for token in tokens]
    assert tokens_of(load_tokenizer(write(tmp_path / "n.gguf", without)), "ab")[1:] == ["▁a", "b"]


# --- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", ["deepseek-llm", "new-model", ""])
def test_an_unknown_pre_tokenizer_is_refused_by_name(tmp_path: Path, pre: str):
    path = write(tmp_path / "m.gguf", byte_level_entries(**{"ggml.pre": pre}))
    with pytest.raises(UnsupportedModelError, match=f"'{pre}'.*smollm"):
        load_tokenizer(path)


@pytest.mark.parametrize("model", ["bert", "t5", "rwkv"])
def test_an_unknown_vocabulary_is_refused_by_name(tmp_path: Path, model: str):
    path = write(tmp_path / "m.gguf", byte_level_entries(**{"ggml.model": model}))
    with pytest.raises(UnsupportedModelError, match=f"'{model}'"):
        load_tokenizer(path)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ggml.tokens": ["a"]}, "token types for 1 tokens"),
        ({"ggml.merges": ["a"]}, "cannot be built"),
        ({"ggml.merges": ["a zz"]}, "cannot be built"),
        ({"ggml.eos_token_id": 10**6}, "eos_token_id' is 1000000"),
        ({"ggml.merges": "a b"}, "merges' is missing or not a list"),
    ],
)
def test_broken_metadata_is_named(tmp_path: Path, changes: dict[str, Any], match: str):
    path = write(tmp_path / "m.gguf", byte_level_entries(**changes))
    with pytest.raises(CheckpointError, match=match):
        load_tokenizer(path)


@pytest.mark.parametrize("key", ["ggml.model", "ggml.tokens", "ggml.merges"])
def test_missing_metadata_is_named(tmp_path: Path, key: str):
    entries = byte_level_entries()
    del entries[key]
    with pytest.raises(CheckpointError, match=f"tokenizer.{key}' is missing"):
        load_tokenizer(write(tmp_path / "m.gguf", entries))


def test_scores_must_match_the_tokens(tmp_path: Path):
    path = write(tmp_path / "m.gguf", spm_entries(**{"ggml.scores": [0.0]}))
    with pytest.raises(CheckpointError, match="1 scores"):
        load_tokenizer(path)


# --- the file format ---------------------------------------------------------------------------------------


def test_metadata_of_every_type(tmp_path: Path):
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    values = {
        GGUFValueType.UINT8: 200,
        GGUFValueType.INT8: -3,
        GGUFValueType.UINT16: 60000,
        GGUFValueType.INT16: -300,
        GGUFValueType.UINT32: 2**32 - 1,
        GGUFValueType.INT32: -(2**31),
        GGUFValueType.FLOAT32: 0.5,
        GGUFValueType.BOOL: True,
        GGUFValueType.STRING: "é",
        GGUFValueType.UINT64: 2**63,
        GGUFValueType.INT64: -(2**62),
        GGUFValueType.FLOAT64: 1e300,
    }
    for kind, value in values.items():
        writer.add_key_value(f"x.{kind.name}", value, kind)
    writer.add_array("x.numbers", [1, 2, 3])
    writer.add_array("x.texts", ["a", "", "é"])
    writer.add_array("x.nested", [[1, 2], [3]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    metadata = read_gguf_metadata(tmp_path / "m.gguf")
    for kind, value in values.items():
        assert metadata[f"x.{kind.name}"] == value
    assert metadata["x.numbers"] == [1, 2, 3]
    assert metadata["x.texts"] == ["a", "", "é"]
    assert metadata["x.nested"] == [[1, 2], [3]]
    assert metadata["general.architecture"] == "llama"
    some = read_gguf_metadata(tmp_path / "m.gguf", lambda key: key == "x.STRING")
    assert some == {"x.STRING": "é"}


def test_a_truncated_file_is_named_at_every_length(tmp_path: Path):
    whole = write(tmp_path / "m.gguf", spm_entries()).read_bytes()
    for length in [*range(0, 200, 7), len(whole) // 2, len(whole) - 40]:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.gguf"):
            load_tokenizer(cut)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "empty"),
        (b"PK\x03\x04" + b"\0" * 40, "not a GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "version 1"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 2**63), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 99), "type 99"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"\xff" + struct.pack("<IB", 0, 1), "corrupt"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 8, 2**60), "truncated"),
        (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<IIQ", 9, 4, 2**60), "truncated"),
    ],
)
def test_files_that_are_not_gguf_are_named(tmp_path: Path, data: bytes, match: str):
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=match):
        read_gguf_metadata(path)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ModelNotFoundError, match=r"no\.gguf"):
        load_tokenizer(tmp_path / "no.gguf")
