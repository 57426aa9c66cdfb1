"""IncrementalDetokenizer: the text of a growing sequence of tokens, piece by piece, never half a character.

The pieces add up to the decoding of the whole sequence, however it was split. A token costs a dictionary
lookup.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.tokenizer.pieces import REPLACEMENT, ProtocolPieces, TokenPieces

MAX_WINDOW = 64
"""Tokens that the *window* kind holds back at most while its text ends in an incomplete character."""
CONTEXT = 6
"""Prompt tokens given to the *window* kind, so that the first output token is decoded as a continuation."""


def make_detokenizer(
    pieces: TokenPieces | ProtocolPieces,
    prompt_token_ids: Sequence[int] = (),
    *,
    skip_special_tokens: bool = True,
    spaces_between_special_tokens: bool = True,
    shown_special_tokens: Sequence[int] = (),
) -> Detokenizer:
    """The detokenizer that fits the tokenizer's decoder.

    Args:
        pieces: the tokenizer's pieces.
        prompt_token_ids: what precedes. A character that the prompt leaves incomplete is completed by the
            output; a space that a decoder drops at the start of a text is kept after a prompt.
        skip_special_tokens: leave special tokens out.
        spaces_between_special_tokens: False takes away spaces that the decoder puts between added tokens
            (byte-level and byte-fallback decoders put none).
        shown_special_tokens: special tokens that are not left out.
    """
    shown = frozenset(shown_special_tokens) if skip_special_tokens else frozenset[int]()
    if isinstance(pieces, ProtocolPieces) or pieces.kind == "window":
        return WindowDetokenizer(
            pieces, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens, shown
        )
    return IncrementalDetokenizer(pieces, prompt_token_ids, skip_special_tokens, shown)


class IncrementalDetokenizer:
    """Detokenizer of byte-level and byte-fallback vocabularies."""

    __slots__ = ("_cache", "_pieces", "_strip", "pending")

    def __init__(
        self,
        pieces: TokenPieces,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._pieces = pieces
        self._cache = pieces.showing(shown) if skip_special_tokens else pieces.all
        self.pending: bytes = pieces.pending_after(prompt_token_ids, skip_special_tokens)
        """Bytes that wait for the rest of their character."""
        cache = self._cache
        self._strip = pieces.strips_first_space and not any(cache[token_id] for token_id in prompt_token_ids)

    def update(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        cache = self._cache
        if len(token_ids) == 1 and not self.pending and not self._strip:
            piece = cache[token_ids[0]]
            if type(piece) is str:
                return piece
        return self._update(token_ids)

    def _update(self, token_ids: Sequence[int]) -> str:
        cache, take = self._cache, self._pieces.take
        texts: list[str] = []
        pending = self.pending
        for token_id in token_ids:
            piece = cache[token_id]
            if not pending and type(piece) is str:
                texts.append(piece)
            else:
                text, pending = take(pending, piece)
                texts.append(text)
        self.pending = pending
        return self._strip_first("".join(texts))

    def flush(self) -> str:
        """The end: what still waits becomes replacement characters."""
        pending, self.pending = self.pending, b""
        return self._strip_first(self._pieces.flush(pending)) if pending else ""

    def _strip_first(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """Detokenizer for any decoder: decodes a short window of tokens with and without the newest ones.

    ``_window[:_read]`` has been emitted and is kept as context; the rest waits for the end of a character.
    """

    __slots__ = ("_last_added", "_pieces", "_prefix", "_read", "_shown", "_skip", "_spaces", "_window")

    def __init__(
        self,
        pieces: TokenPieces | ProtocolPieces,
        prompt_token_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._pieces = pieces
        self._skip = skip_special_tokens
        self._shown = shown
        self._spaces = spaces_between_special_tokens or skip_special_tokens
        self._window: list[int] = list(prompt_token_ids[-CONTEXT:])
        self._read = len(self._window)
        self._prefix = self._decode(self._window)
        self._last_added = False

    @property
    def pending(self) -> bytes:
        """Always empty: this kind waits for tokens, not for bytes."""
        return b""

    def update(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        return "".join([self._step(token_id) for token_id in token_ids])

    def flush(self) -> str:
        """The end: what still waits is emitted as it is."""
        return self._emit(self._decode(self._window))

    def _step(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        waits = len(text) <= len(self._prefix) or text.endswith(REPLACEMENT)
        if waits and len(self._window) - self._read < MAX_WINDOW:
            return ""
        new = self._emit(text)
        added = self._pieces.is_added(token_id)
        if added and self._last_added and not self._spaces:
            new = new.removeprefix(" ")
        self._last_added = added
        return new

    def _emit(self, text: str) -> str:
        new = text[len(self._prefix) :]
        self._window = self._window[self._read :] if len(self._window) > self._read else self._window
        self._read = len(self._window)
        self._prefix = self._decode(self._window)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        if self._shown:
            hidden = self._pieces.special_token_ids - self._shown
            shown = [token_id for token_id in token_ids if token_id not in hidden]
            return self._pieces.decode_window(shown, False)
        return self._pieces.decode_window(token_ids, self._skip)


Detokenizer = IncrementalDetokenizer | WindowDetokenizer
"""``update(token_ids) -> text``, ``flush() -> text`` and the ``pending`` bytes."""
