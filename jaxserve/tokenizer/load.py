"""Load a tokenizer from a Hugging Face folder, a hub id, or a GGUF file.

``tokenizer.json`` is read with the ``tokenizers`` library alone, and GGUF with our own reader: importing
transformers takes seconds. It is the fallback for folders that hold only older formats.

As in transformers 5, the post-processor of ``tokenizer.json`` alone says which special tokens are added
to a text; ``add_bos_token`` and ``add_eos_token`` of ``tokenizer_config.json`` are left-overs beside
it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from jaxserve.errors import CheckpointError, ModelNotFoundError, UnsupportedModelError
from jaxserve.tokenizer.fast_tokenizer import FastTokenizer
from jaxserve.tokenizer.gguf_metadata import read_gguf_metadata
from jaxserve.tokenizer.gguf_tokenizer import PREFIX, build_gguf_tokenizer

TOKENIZER_FILES = (
    "tokenizer*", "*.jinja", "additional_chat_templates/*", "special_tokens_map.json", "added_tokens.json",
    "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json", "config.json",
)  # fmt: skip
"""What is fetched for a tokenizer from the hub."""
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer(path: Path | str, format: str = "hf", *, revision: str | None = None) -> FastTokenizer:
    """The tokenizer at ``path``.

    Args:
        path: a folder, a ``.gguf`` file, or a hub id (the cache and ``HF_HUB_OFFLINE`` are respected).
        format: ``hf`` or ``gguf``.
        revision: branch, tag or commit of a hub id.

    Raises:
        ModelNotFoundError: nothing is there.
        CheckpointError: a file is broken.
        UnsupportedModelError: this kind of tokenizer is not known.
    """
    location = Path(path)
    if format == "gguf" or location.suffix == ".gguf":
        return load_gguf_tokenizer(location)
    if not location.is_dir():
        if location.exists():
            raise ModelNotFoundError(f"{path} is a file, not a tokenizer's folder.")
        location = _fetch(str(path), revision)
    if (location / "tokenizer.json").is_file():
        return _load_tokenizer_json(location, _read_json(location / "tokenizer_config.json"))
    return _load_with_transformers(location)


def load_gguf_tokenizer(path: Path) -> FastTokenizer:
    """The tokenizer inside a ``.gguf`` file."""
    if not path.is_file():
        raise ModelNotFoundError(f"{path} does not exist.")
    metadata = read_gguf_metadata(path, lambda key: key.startswith(PREFIX))
    gguf = build_gguf_tokenizer(metadata, path.name)
    tokens: list[str] = metadata[PREFIX + "ggml.tokens"]
    return FastTokenizer(
        gguf.backend,
        named_tokens={name: tokens[token_id] for name, token_id in gguf.named_tokens.items()},
        chat_templates=gguf.chat_templates,
        eos_token_ids=gguf.eos_token_ids,
    )


def resolve_eos_token_ids(
    tokenizer: FastTokenizer | None, config: Mapping[str, Any], generation_config: Mapping[str, Any]
) -> list[int]:
    """Every id that ends a sequence: of generation_config.json, else of config.json, and the tokenizer's own.

    Raises:
        CheckpointError: ``eos_token_id`` is neither an id nor a list of ids.
    """
    ids: list[int] = []
    text_config = config.get("text_config") or {}
    for source in (
        generation_config.get("eos_token_id"),
        config.get("eos_token_id", text_config.get("eos_token_id")),
    ):
        if source is not None:
            ids = _as_ids(source)
            break
    if tokenizer is not None:
        ids += tokenizer.eos_token_ids
    return list(dict.fromkeys(ids))


def _as_ids(value: Any) -> list[int]:
    ids: list[Any] = value if isinstance(value, list) else [value]
    if any(isinstance(token_id, bool) or not isinstance(token_id, int) for token_id in ids):
        raise CheckpointError(f"eos_token_id must be a token id or a list of them, got {value!r}.")
    return list(ids)


def _fetch(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(TOKENIZER_FILES)))
    except HFValidationError as error:
        raise ModelNotFoundError(f"{name!r} is neither a folder nor a hub id.") from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError(f"The tokenizer {name!r} cannot be fetched from the hub: {error}") from error


def _load_tokenizer_json(folder: Path, config: dict[str, Any]) -> FastTokenizer:
    try:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # the library raises bare exceptions
        raise CheckpointError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
    backend.no_truncation()
    backend.no_padding()
    named = _named_tokens(folder, config)
    _add_missing_tokens(backend, config, named)
    return FastTokenizer(backend, named_tokens=named, chat_templates=_chat_templates(folder, config))


def _named_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """``bos_token``, … of tokenizer_config.json; of special_tokens_map.json where that does not say."""
    older = _read_json(folder / "special_tokens_map.json")
    named: dict[str, str] = {}
    for name in dict.fromkeys((*NAMED_TOKENS, *(key for key in config if key.endswith("_token")))):
        token = config[name] if name in config else older.get(name)
        text = token.get("content") if isinstance(token, dict) else token
        if isinstance(text, str):
            named[name] = text
    return named


def _add_missing_tokens(backend: Backend, config: dict[str, Any], named: Mapping[str, str]) -> None:
    """Tokens that tokenizer_config.json declares and tokenizer.json does not know as added."""
    known = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    declared: dict[str, dict[str, Any]] = config.get("added_tokens_decoder") or {}
    for _, token in sorted(declared.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            flags = {
                name: bool(token.get(name, False))
                for name in ("lstrip", "rstrip", "single_word", "normalized")
            }
            added = AddedToken(token["content"], special=bool(token.get("special", False)), **flags)
            backend.add_tokens([added])
            known[token["content"]] = added.special
    for text in named.values():
        if not known.get(text, False):
            backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """chat_template.jinja (and its named companions), else tokenizer_config.json or chat_template.json."""
    templates = _templates_of(config.get("chat_template"))
    templates |= _templates_of(_read_json(folder / "chat_template.json").get("chat_template"))
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates["default"] = single.read_text(encoding="utf-8")
    for file in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates


def _templates_of(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        entries = cast("list[dict[str, str]]", value)
        return {entry["name"]: entry["template"] for entry in entries}
    return dict(value) if isinstance(value, dict) else {}


def _load_with_transformers(folder: Path) -> FastTokenizer:
    os.environ.setdefault(
        "TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"
    )  # it would miss PyTorch, which nobody needs here
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:  # transformers raises many kinds for a folder without a tokenizer
        reason = str(error).partition("\n")[0].rstrip(": ")
        raise ModelNotFoundError(
            f"{folder} holds no tokenizer that can be read: it has no tokenizer.json, and transformers says: {reason}. "
            "Put one there, or name a folder that has one with --tokenizer."
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Backend):
        raise UnsupportedModelError(
            f"{folder}: {type(tokenizer).__name__} is no fast tokenizer; the folder needs a tokenizer.json.",
            param="tokenizer",
        )
    backend.no_truncation()
    backend.no_padding()
    templates = _templates_of(getattr(tokenizer, "chat_template", None))
    return FastTokenizer(backend, named_tokens=tokenizer.special_tokens_map, chat_templates=templates)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object.")
    return cast("dict[str, Any]", value)
