"""Build a ``tokenizers.Tokenizer`` from the metadata of a GGUF file.

Two vocabularies are read: ``gpt2`` (byte-level BPE with merges) and ``llama`` (SentencePiece BPE with scores
and byte fallback). A GGUF file names its pre-tokenizer only (``tokenizer.ggml.pre``); the patterns below are
those of the tokenizers so named. An unknown name is refused: with the wrong pattern the text would be cut
differently from how the model was trained, and nobody would notice.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from jaxserve.errors import CheckpointError, UnsupportedModelError

PREFIX = "tokenizer."


class TokenType(enum.IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class PreTokenizer:
    """How a byte-level vocabulary cuts text before merging.

    ``patterns`` are applied one after the other, each to the pieces that the last one left; what a pattern
    matches becomes a piece of its own.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    """Compose Unicode characters first."""
    ignore_merges: bool = False
    """A piece that is a token as a whole is taken without merging."""
    add_bos: bool = False
    """What holds when the file does not say ``add_bos_token``."""


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL
_UPPER = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SLASH_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*|\p{{N}}{_SLASH_TAIL}"
_GPT4O = rf"{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|\p{{N}}{{1,3}}{_SLASH_TAIL}"

_PRE_TOKENIZERS: dict[tuple[str, ...], PreTokenizer] = {
    ("default",): PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    ("gpt-2", "phi-2", "olmo", "mpt", "jais"): PreTokenizer((_GPT2,)),
    ("smollm", "starcoder", "refact", "command-r", "codeshell"): PreTokenizer((r"\p{N}", _GPT2)),
    ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"): PreTokenizer(
        (_LLAMA3,), ignore_merges=True, add_bos=True
    ),
    ("smaug-bpe", "dbrx"): PreTokenizer((_LLAMA3,)),
    ("qwen2",): PreTokenizer((_QWEN2,), nfc=True),
    ("deepseek-r1-qwen",): PreTokenizer((_QWEN2,)),
    ("tekken",): PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    ("gpt-4o", "llama4"): PreTokenizer((_GPT4O,), ignore_merges=True),
}
PRE_TOKENIZERS = {name: pre for names, pre in _PRE_TOKENIZERS.items() for name in names}


@dataclass(frozen=True)
class GGUFTokenizer:
    """A tokenizer as a GGUF file describes it."""

    backend: Tokenizer
    named_tokens: dict[str, int]
    """``bos_token``, ``eos_token``, ``unk_token``, ``pad_token`` and their ids."""
    eos_token_ids: list[int]
    """Every id that ends a turn: end of sequence, of turn and of message."""
    chat_templates: dict[str, str]
    """By name; the unnamed one is ``default``."""


def build_gguf_tokenizer(metadata: dict[str, Any], source: str) -> GGUFTokenizer:
    """The tokenizer of a GGUF file.

    Args:
        metadata: the entries whose keys begin with ``tokenizer.``.
        source: the file's name, for error messages.

    Raises:
        UnsupportedModelError: the kind of vocabulary or the pre-tokenizer is not known here.
        CheckpointError: entries are missing or contradict each other.
    """
    entries = _Entries(metadata, source)
    kind = entries.required("ggml.model", str)
    if kind == "gpt2":
        backend, default_bos = _byte_level(entries)
    elif kind == "llama":
        backend, default_bos = _sentencepiece(entries), True
    else:
        raise UnsupportedModelError(
            f"{source}: tokenizer.ggml.model is {kind!r}; 'gpt2' and 'llama' are supported.",
            param="tokenizer",
        )
    _add_tokens(backend, entries)
    named = _named_tokens(entries)
    _set_post_processor(backend, entries, named, default_bos)
    return GGUFTokenizer(backend, named, _eos_token_ids(entries), _chat_templates(metadata))


class _Entries:
    """The ``tokenizer.`` entries, checked as they are read."""

    def __init__(self, metadata: dict[str, Any], source: str) -> None:
        self._metadata = metadata
        self.source = source
        self.tokens: list[str] = self.required("ggml.tokens", list)
        types: list[int] = metadata.get(PREFIX + "ggml.token_type") or [1] * len(self.tokens)
        if len(types) != len(self.tokens):
            self.fail(f"{len(types)} token types for {len(self.tokens)} tokens")
        self.token_types: list[int] = types

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(PREFIX + key, default)

    def required(self, key: str, kind: type[Any]) -> Any:
        value = self.get(key)
        if not isinstance(value, kind) or not value:
            self.fail(f"'{PREFIX}{key}' is missing or not a {kind.__name__}")
        return value

    def token_id(self, key: str) -> int | None:
        """An id stored under ``key``; None where the file has none (or 2**32 - 1, an older way to say so)."""
        value = self.get(key)
        if value is None or value == 0xFFFFFFFF:
            return None
        if not 0 <= value < len(self.tokens):
            self.fail(f"'{PREFIX}{key}' is {value}, but there are {len(self.tokens)} tokens")
        return int(value)

    def fail(self, reason: str) -> None:
        raise CheckpointError(f"{self.source}: the tokenizer cannot be read: {reason}.")


def _byte_level(entries: _Entries) -> tuple[Tokenizer, bool]:
    name = entries.get("ggml.pre", "default")
    pre = PRE_TOKENIZERS.get(name)
    if pre is None:
        raise UnsupportedModelError(
            f"{entries.source}: the pre-tokenizer {name!r} (tokenizer.ggml.pre) is not supported; known are "
            f"{', '.join(sorted(PRE_TOKENIZERS))}. Use the model's Hugging Face folder as --tokenizer.",
            param="tokenizer",
        )
    merges = [tuple(merge.split(" ", 1)) for merge in entries.required("ggml.merges", list)]
    vocab = {token: index for index, token in enumerate(entries.tokens)}
    backend = Tokenizer(_bpe(entries, vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend, pre.add_bos


def _sentencepiece(entries: _Entries) -> Tokenizer:
    """SentencePiece BPE: spaces are U+2581, one begins every stretch of text, bytes are the fallback."""
    scores = entries.required("ggml.scores", list)
    if len(scores) != len(entries.tokens):
        entries.fail(f"{len(scores)} scores for {len(entries.tokens)} tokens")
    vocab = {token: index for index, token in enumerate(entries.tokens)}
    unknown = entries.token_id("ggml.unknown_token_id")
    backend = Tokenizer(
        _bpe(
            entries,
            vocab=vocab,
            merges=_merges_from_scores(entries.tokens, scores, vocab),
            unk_token=None if unknown is None else entries.tokens[unknown],
            fuse_unk=True,
            byte_fallback="<0x00>" in vocab,
        )
    )
    to_space = decoders.Replace("\u2581", " ")
    from_space = normalizers.Replace(" ", "\u2581")
    if entries.get("ggml.add_space_prefix", True):
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), from_space])
        strip = [decoders.Strip(content=" ", left=1, right=0)]
    else:
        backend.normalizer, strip = from_space, []
    backend.decoder = decoders.Sequence([to_space, decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend


def _bpe(entries: _Entries, **arguments: Any) -> BPE:
    try:
        return BPE(**arguments)
    except Exception as error:  # the library raises bare exceptions
        raise CheckpointError(f"{entries.source}: the tokenizer cannot be built: {error}") from error


def _merges_from_scores(
    tokens: list[str], scores: list[float], vocab: dict[str, int]
) -> list[tuple[str, str]]:
    """Merges that build the same tokens: every way to cut a token into two tokens, best score first."""
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores):
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            left_id, right_id = vocab.get(left), vocab.get(right)
            if left_id is not None and right_id is not None:
                merges.append((-score, left_id, right_id, left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _add_tokens(backend: Tokenizer, entries: _Entries) -> None:
    """Control tokens are special; user-defined ones are matched whole, too, but decode as ordinary text."""
    special: list[AddedToken] = []
    plain: list[AddedToken] = []
    for token, kind in zip(entries.tokens, entries.token_types):
        if kind == TokenType.CONTROL or (kind == TokenType.UNKNOWN and token):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _named_tokens(entries: _Entries) -> dict[str, int]:
    keys = {
        "bos_token": "ggml.bos_token_id",
        "eos_token": "ggml.eos_token_id",
        "unk_token": "ggml.unknown_token_id",
        "pad_token": "ggml.padding_token_id",
    }
    found = {name: entries.token_id(key) for name, key in keys.items()}
    return {name: token_id for name, token_id in found.items() if token_id is not None}


def _eos_token_ids(entries: _Entries) -> list[int]:
    ids = [entries.token_id(f"ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _set_post_processor(
    backend: Tokenizer, entries: _Entries, named: dict[str, int], default_bos: bool
) -> None:
    wanted = {
        "bos_token": bool(entries.get("ggml.add_bos_token", default_bos)) and "bos_token" in named,
        "eos_token": bool(entries.get("ggml.add_eos_token", False)) and "eos_token" in named,
    }
    special = [(entries.tokens[named[name]], named[name]) for name, add in wanted.items() if add]
    set_bos_eos(
        backend,
        bos=entries.tokens[named["bos_token"]] if wanted["bos_token"] else None,
        eos=entries.tokens[named["eos_token"]] if wanted["eos_token"] else None,
        special_tokens=special,
    )


def set_bos_eos(
    backend: Tokenizer, *, bos: str | None, eos: str | None, special_tokens: list[tuple[str, int]]
) -> None:
    """Make ``encode(add_special_tokens=True)`` put ``bos`` before and ``eos`` after the text, if given."""
    template = ([bos] if bos else []) + ["$A"] + ([eos] if eos else [])
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=special_tokens)


def _chat_templates(metadata: dict[str, Any]) -> dict[str, str]:
    key = PREFIX + "chat_template"
    templates = {name[len(key) + 1 :]: text for name, text in metadata.items() if name.startswith(key + ".")}
    if key in metadata:
        templates["default"] = metadata[key]
    return templates
