"""Tokenizers of Hugging Face folders: every file that has a say is heard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from jaxserve.errors import CheckpointError, InvalidRequestError, ModelNotFoundError
from jaxserve.tokenizer.fast_tokenizer import FastTokenizer
from jaxserve.tokenizer.gguf_tokenizer import set_bos_eos
from jaxserve.tokenizer.load import load_tokenizer, resolve_eos_token_ids

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BOS, EOS = len(ALPHABET), len(ALPHABET) + 1


def write_folder(folder: Path, config: dict[str, Any] | None = None, **files: Any) -> Path:
    """A folder with a byte-level tokenizer.json, and what else is given."""
    folder.mkdir(exist_ok=True)
    backend = Tokenizer(BPE(vocab={token: i for i, token in enumerate(ALPHABET)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
    backend.enable_truncation(5)
    backend.enable_padding()
    backend.save(str(folder / "tokenizer.json"))
    if config is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


NAMED = {"bos_token": "<bos>", "eos_token": {"content": "<eos>", "__type": "AddedToken"}}


def test_a_folder_with_tokenizer_json(tmp_path: Path):
    tokenizer = load_tokenizer(write_folder(tmp_path / "m", {**NAMED, "chat_template": "template"}))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)
    assert tokenizer.special_tokens_map == {"bos_token": "<bos>", "eos_token": "<eos>"}
    assert tokenizer.special_token_ids == {BOS, EOS}
    assert tokenizer.chat_template == "template"
    assert tokenizer.vocab_size == len(ALPHABET) + 2
    assert tokenizer.eos_token_ids == [EOS]
    assert len(tokenizer.encode("a long text")) == 11, "truncation and padding of the file are off"


def test_a_folder_without_a_config(tmp_path: Path):
    tokenizer = load_tokenizer(write_folder(tmp_path / "m"))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.chat_template) == (None, None, None)
    assert tokenizer.special_tokens_map == {}
    assert tokenizer.decode(tokenizer.encode("é")) == "é"


@pytest.mark.parametrize("config", [{}, {"add_bos_token": True}, {"add_eos_token": True}])
def test_tokenizer_json_alone_says_what_is_added_to_a_text(tmp_path: Path, config: dict[str, Any]):
    plain = load_tokenizer(write_folder(tmp_path / "m", {**NAMED, **config}))
    assert plain.encode("a") == plain.encode("a", add_special_tokens=False)
    folder = write_folder(tmp_path / "n", {**NAMED, **config, "add_bos_token": False})
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    set_bos_eos(backend, bos="<bos>", eos=None, special_tokens=[("<bos>", BOS)])
    backend.save(str(folder / "tokenizer.json"))
    adding = load_tokenizer(folder)
    assert adding.encode("a") == [BOS, *plain.encode("a")]
    assert adding.encode("a", add_special_tokens=False) == plain.encode("a")


def test_tokens_declared_in_the_config_alone_are_added(tmp_path: Path):
    config = {
        **NAMED,
        "pad_token": "<pad>",
        "added_tokens_decoder": {
            "258": {"content": "<tool>", "special": False, "lstrip": False},
            "259": {"content": "<end>", "special": True},
        },
    }
    tokenizer = load_tokenizer(write_folder(tmp_path / "m", config))
    ids = tokenizer.encode("<tool><end><pad>")
    assert ids == [258, 259, 260]
    assert tokenizer.decode(ids) == "<tool>"
    assert tokenizer.pad_token_id == 260


def test_older_special_tokens_map_counts_where_the_config_is_silent(tmp_path: Path):
    older = {"eos_token": "<eos>", "bos_token": {"content": "a"}}
    folder = write_folder(tmp_path / "m", {"bos_token": "<bos>"}, special_tokens_map__json=older)
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, EOS)


def test_chat_templates_come_from_every_place(tmp_path: Path):
    several = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "tools"}]
    assert load_tokenizer(write_folder(tmp_path / "a", {"chat_template": several})).chat_templates == {
        "default": "one",
        "tool_use": "tools",
    }
    folder = write_folder(tmp_path / "b", {"chat_template": "old"}, chat_template__jinja="new")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("documents")
    assert load_tokenizer(folder).chat_templates == {"default": "new", "rag": "documents"}
    folder = write_folder(tmp_path / "c", {}, chat_template__json={"chat_template": "legacy"})
    assert load_tokenizer(folder).chat_template == "legacy"


def test_a_folder_of_an_older_format_is_read_through_transformers(tmp_path: Path):
    folder = tmp_path / "m"
    folder.mkdir()
    vocabulary = {token: i for i, token in enumerate([*ALPHABET, "ab", "<|endoftext|>"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("abé")) == ["ab", "Ã", "©"]
    assert tokenizer.decode(tokenizer.encode("abé<|endoftext|>")) == "abé"
    assert tokenizer.eos_token_id == vocabulary["<|endoftext|>"]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("tokenizer.json", "{", "tokenizer.json cannot be read"),
        ("tokenizer.json", '{"model": {}}', "tokenizer.json cannot be read"),
        ("tokenizer_config.json", "{", "tokenizer_config.json is not valid JSON"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json must hold a JSON object"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str, match: str):
    folder = write_folder(tmp_path / "m", {})
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=match):
        load_tokenizer(folder)


def test_what_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match="empty holds no tokenizer"):
        load_tokenizer(tmp_path / "empty")
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(ModelNotFoundError, match="is a file"):
        load_tokenizer(tmp_path / "file.txt")
    with pytest.raises(ModelNotFoundError, match="neither a folder nor a hub id"):
        load_tokenizer("/no/such/folder")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelNotFoundError, match="someone/something"):
        load_tokenizer("someone/something")


def test_a_hub_id_is_found_in_the_cache_offline(tmp_path: Path):
    """In a process of its own: the hub's library reads its settings when it is imported."""
    snapshot = tmp_path / "models--someone--something" / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    write_folder(snapshot, NAMED)
    refs = tmp_path / "models--someone--something" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    code = (
        "from jaxserve.tokenizer.load import load_tokenizer; "
        "print(load_tokenizer('someone/something').encode('a'))"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [ALPHABET.index("a")]


def test_loading_imports_neither_transformers_nor_a_framework(tmp_path: Path):
    folder = write_folder(tmp_path / "m", NAMED)
    code = (
        f"import sys; from jaxserve.tokenizer.load import load_tokenizer; load_tokenizer({str(folder)!r}); "
        "import jaxserve.tokenizer.chat_template, jaxserve.engine.output_processor; "
        "print([m for m in ('transformers', 'torch', 'jax', 'huggingface_hub') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


def test_many_threads_share_one_tokenizer(smollm2: FastTokenizer):
    texts = [f"Text number {i}: é你好👋🏽 " * (i % 7 + 1) for i in range(64)]
    expected = [smollm2.encode(text) for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(smollm2.encode, texts * 4)) == expected * 4
        assert list(pool.map(smollm2.decode, expected * 4)) == texts * 4


def test_half_a_surrogate_pair_is_refused(smollm2: FastTokenizer):
    with pytest.raises(InvalidRequestError, match=r"U\+DC80.*character 3"):
        smollm2.encode("abc\udc80")


# --- ids that end a sequence -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "generation_config", "expected"),
    [
        ({}, {}, [EOS]),
        ({"eos_token_id": 7}, {}, [7, EOS]),
        ({"eos_token_id": [7, 8]}, {}, [7, 8, EOS]),
        ({"eos_token_id": 7}, {"eos_token_id": [8, EOS]}, [8, EOS]),
        ({"eos_token_id": None}, {"eos_token_id": None}, [EOS]),
        ({"text_config": {"eos_token_id": 9}}, {}, [9, EOS]),
    ],
)
def test_eos_ids_of_every_source(tmp_path: Path, config: Any, generation_config: Any, expected: list[int]):
    tokenizer = load_tokenizer(write_folder(tmp_path / "m", NAMED))
    assert resolve_eos_token_ids(tokenizer, config, generation_config) == expected
    without = resolve_eos_token_ids(None, config, generation_config)
    assert without == [token_id for token_id in expected if token_id != EOS or EOS in without]


@pytest.mark.parametrize("value", ["2", [2, "3"], True, 1.5, [None], {}])
def test_eos_ids_of_a_wrong_type_are_named(value: Any):
    with pytest.raises(CheckpointError, match="eos_token_id"):
        resolve_eos_token_ids(None, {"eos_token_id": value}, {})
