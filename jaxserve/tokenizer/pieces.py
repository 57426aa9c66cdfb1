"""TokenPieces: the text of single tokens, cached, so that decoding a token is a dictionary lookup.

Decoders come in three kinds. *bytes* (byte-level BPE): every token is a run of bytes, the text is their
UTF-8. *fallback* (SentencePiece BPE): tokens are text, except byte tokens such as ``<0xE4>``. *window*:
anything else, where a token's text depends on its neighbours; the library decodes a short window of tokens
then.

Malformed UTF-8 becomes U+FFFD: in byte-level text one for each maximal malformed part, as Unicode recommends;
in byte tokens one for each byte.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from jaxserve.tokenizer.interface import Tokenizer

REPLACEMENT = "\ufffd"
Piece = str | bytes
"""A token's text; bytes where they are not UTF-8 on their own."""
MAX_SHOWING = 16
"""Sets of shown special tokens whose caches are kept."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenPieces:
    """The pieces of one tokenizer. Safe to share between threads: the caches only grow, with equal values."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._added: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        # The library tells special tokens by their text, so that an equal token of the model counts, too.
        self._special_texts = {token.content for token in added.values() if token.special}
        self.special_token_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        decoder = describe_decoder(backend)
        self.kind: Literal["bytes", "fallback", "window"] = decoder.kind
        self.strips_first_space: bool = decoder.strips_first_space
        self._replace = decoder.replace
        self.all = _PieceCache(self, skip_special=False)
        """Token id to piece; ids that do not exist have an empty one."""
        self.without_special = _PieceCache(self, skip_special=True)
        """The same with special tokens left out."""
        self._showing: dict[frozenset[int], _PieceCache] = {}

    def showing(self, special_token_ids: frozenset[int]) -> _PieceCache:
        """``without_special``, but with these special tokens left in."""
        if not special_token_ids:
            return self.without_special
        cache = self._showing.get(special_token_ids)
        if cache is None:
            cache = _PieceCache(self, skip_special=True)
            cache.update((token_id, self.all[token_id]) for token_id in special_token_ids)
            if len(self._showing) < MAX_SHOWING:
                self._showing[special_token_ids] = cache
        return cache

    def is_added(self, token_id: int) -> bool:
        """Whether the token stands beside the model's own vocabulary."""
        return token_id in self._added

    def make(self, token_id: int, skip_special: bool) -> Piece:
        """The piece of a token, not cached."""
        token = self.token(token_id)
        if not token or (skip_special and token in self._special_texts):
            return ""
        if self.kind == "bytes":
            return _text_or_bytes(_byte_level_bytes(token))
        if self.kind == "fallback":
            for old, new in self._replace:
                token = token.replace(old, new)
            match = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(match[1], 16)]) if match else token
        return self._backend.decode([token_id], skip_special_tokens=skip_special)

    def token(self, token_id: int) -> str:
        """The vocabulary's own spelling, empty for an id that does not exist."""
        added = self._added.get(token_id)
        if added is not None:
            return added
        if not 0 <= token_id < 2**32:
            return ""
        return self._backend.id_to_token(token_id) or ""

    def decode_window(self, token_ids: Sequence[int], skip_special: bool) -> str:
        """The library's own decoding, for the *window* kind."""
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special)

    def take(self, pending: bytes, piece: Piece) -> tuple[str, bytes]:
        """Append a piece to bytes that wait for the rest of their character.

        Returns:
            The text that is complete now, and the bytes that still wait (at most three).
        """
        if self.kind == "bytes":
            data = pending + (piece if isinstance(piece, bytes) else piece.encode())
            text, used = codecs.utf_8_decode(data, "replace", False)
            return text, data[used:]
        if isinstance(piece, str):
            return (REPLACEMENT * len(pending) + piece, b"") if piece else ("", pending)
        return _take_byte_tokens(pending + piece)

    def text_of(self, token_id: int, pending: bytes) -> str:
        """A single token's text, special or not, for people to read.

        A token that completes the character begun by ``pending`` stands for all of it; one that only goes on
        with or begins a character has none.
        """
        piece = self.all[token_id]
        if isinstance(piece, str) and (not pending or self.kind != "bytes"):
            return piece
        text, _ = self.take(pending, piece)
        return self.take(b"", piece)[0] if pending and REPLACEMENT in text else text

    def flush(self, pending: bytes) -> str:
        """What becomes of bytes whose character never ends."""
        return pending.decode("utf-8", "replace") if self.kind == "bytes" else REPLACEMENT * len(pending)

    def pending_after(self, token_ids: Sequence[int], skip_special: bool) -> bytes:
        """The incomplete character at the end of ``token_ids``; empty for the *window* kind."""
        if self.kind == "window":
            return b""
        cache = self.without_special if skip_special else self.all
        start = len(token_ids)
        # A character has four bytes, and a piece without a complete one has three at most: look back over
        # those.
        while start > 0 and len(token_ids) - start < 4 and isinstance(cache[token_ids[start - 1]], bytes):
            start -= 1
        pending = b""
        for token_id in token_ids[start:]:
            pending = self.take(pending, cache[token_id])[1]
        return pending


class ProtocolPieces:
    """Pieces of any tokenizer, of which only the Tokenizer protocol is known."""

    kind: Literal["window"] = "window"
    strips_first_space = False

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special_token_ids = tokenizer.special_token_ids

    def is_added(self, token_id: int) -> bool:
        """Whether the token is special: the protocol knows no other added ones."""
        return token_id in self.special_token_ids

    def decode_window(self, token_ids: Sequence[int], skip_special: bool) -> str:
        """The tokenizer's own decoding."""
        return self._tokenizer.decode(token_ids, skip_special_tokens=skip_special)

    def text_of(self, token_id: int, pending: bytes) -> str:
        """A single token's text, special or not."""
        return self._tokenizer.decode([token_id], skip_special_tokens=False)


def pieces_of(tokenizer: Tokenizer) -> TokenPieces | ProtocolPieces:
    """The pieces of a tokenizer: its own, shared ones where it has them."""
    pieces = getattr(tokenizer, "pieces", None)
    return pieces if isinstance(pieces, TokenPieces) else ProtocolPieces(tokenizer)


class _PieceCache(dict[int, Piece]):
    """Filled as tokens are met: a table of the whole vocabulary would cost a tenth of a second at start."""

    def __init__(self, pieces: TokenPieces, skip_special: bool) -> None:
        super().__init__()
        self._pieces = pieces
        self._skip_special = skip_special

    def __missing__(self, token_id: int) -> Piece:
        piece = self._pieces.make(token_id, self._skip_special)
        self[token_id] = piece
        return piece


def _take_byte_tokens(data: bytes) -> tuple[str, bytes]:
    text = ""
    while True:
        try:
            done, used = codecs.utf_8_decode(data, "strict", False)
            return text + done, data[used:]
        except UnicodeDecodeError as error:
            text += data[: error.start].decode() + REPLACEMENT
            data = data[error.start + 1 :]


def _byte_alphabet() -> dict[str, int]:
    """How byte-level BPE spells bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_ALPHABET = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """A token's bytes; one with a character outside the alphabet (an added token) is plain text."""
    try:
        return bytes([BYTE_ALPHABET[character] for character in token])
    except KeyError:
        return token.encode()


def _text_or_bytes(data: bytes) -> Piece:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


class DecoderKind:
    """How a library decoder works, as far as single pieces can reproduce it."""

    def __init__(
        self,
        kind: Literal["bytes", "fallback", "window"],
        replace: Sequence[tuple[str, str]] = (),
        strips_first_space: bool = False,
    ) -> None:
        self.kind: Literal["bytes", "fallback", "window"] = kind
        self.replace = tuple(replace)
        self.strips_first_space = strips_first_space


def describe_decoder(backend: Backend) -> DecoderKind:
    """Recognize byte-level and byte-fallback decoders by their settings."""
    if backend.decoder is None:
        return DecoderKind("window")
    settings: dict[str, Any] = json.loads(bytes(backend.decoder.__getstate__()))
    steps: list[dict[str, Any]] = settings["decoders"] if settings["type"] == "Sequence" else [settings]
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return DecoderKind("bytes")
    replaces: list[tuple[str, str]] = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        replaces.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        steps = steps[1:]
    names = [step["type"] for step in steps]
    if names == ["ByteFallback", "Fuse"]:
        return DecoderKind("fallback", replaces)
    if names == ["ByteFallback", "Fuse", "Strip"] and _strips_one_space(steps[2]):
        return DecoderKind("fallback", replaces, strips_first_space=True)
    return DecoderKind("window")


def _strips_one_space(step: dict[str, Any]) -> bool:
    return (step["content"], step["start"], step["stop"]) == (" ", 1, 0)
