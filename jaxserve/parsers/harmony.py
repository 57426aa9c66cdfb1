"""gpt-oss's Harmony format: an output is a row of messages, each on a channel, some to a function.

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>``. A call is a
message with a recipient: ``<|channel|>commentary to=functions.name <|constrain|>json<|message|>{…}<|call|>``; the
recipient may also stand before the channel. The first message's ``<|start|>assistant`` is in the prompt.
"""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

from jaxserve.parsers.scan import first_tag, partial_tag

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
SPECIAL_TOKENS = (START, CHANNEL, MESSAGE, "<|constrain|>", *ENDS)
MAX_HEADER = 512
"""Characters of a message's header."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([\w.-]+)")

Kind = Literal["plain", "header", "body", "end"]


class Piece(NamedTuple):
    """A part of an output.

    ``plain``: text outside messages (or a header that is none). ``header``: a whole header, with its
    ``<|message|>``. ``body``: more of the message. ``end``: the message has ended; the text is its end tag, if any.
    """

    kind: Kind
    text: str


class Header(NamedTuple):
    """What a header says. ``recipient``: such as ``functions.name``."""

    channel: str
    recipient: str | None


def read_header(text: str) -> Header:
    """The channel (``final`` if it names none) and the recipient."""
    channel, recipient = _CHANNEL.search(text), _RECIPIENT.search(text)
    return Header(channel[1] if channel else "final", recipient[1] if recipient else None)


class MessageReader:
    """Splits an output into pieces, however it was cut."""

    def __init__(self) -> None:
        self._buffer = ""
        self._state: Literal["beginning", "outside", "header", "body"] = "beginning"

    def feed(self, text: str, *, final: bool) -> list[Piece]:
        """The pieces that ``text`` decides; with ``final`` all that is left."""
        self._buffer += text
        pieces: list[Piece] = []
        while self._buffer:
            before = (len(self._buffer), self._state)
            piece = self._next(final)
            if piece is not None:
                pieces.append(piece)
            elif before == (len(self._buffer), self._state):
                break
        return pieces

    def _next(self, final: bool) -> Piece | None:
        if self._state == "beginning":
            return self._read_beginning(final)
        if self._state == "outside":
            return self._read_outside(final)
        return self._read_header(final) if self._state == "header" else self._read_body(final)

    def _read_beginning(self, final: bool) -> None:
        """The first header may begin with its recipient; anything else is found outside."""
        text = self._buffer.lstrip()
        if text.startswith("to="):
            self._state = "header"
        elif text and (final or not "to=".startswith(text)):
            self._state = "outside"

    def _read_outside(self, final: bool) -> Piece | None:
        hit = first_tag(self._buffer, (START, CHANNEL))
        if hit is not None and hit[0] == 0:
            self._state = "header"
            return None
        kept = 0 if final else partial_tag(self._buffer, (START, CHANNEL))
        size = len(self._buffer) - kept if hit is None else hit[0]
        return self._take("plain", size)

    def _read_header(self, final: bool) -> Piece | None:
        hit = first_tag(self._buffer[: MAX_HEADER + len(MESSAGE)], (MESSAGE,))
        if hit is not None:
            self._state = "body"
            return self._take("header", hit[0] + len(MESSAGE))
        if final or len(self._buffer) >= MAX_HEADER + len(MESSAGE):
            self._state = "outside"
            return self._take("plain", 1)  # no header: only its first character is known not to begin one
        return None

    def _read_body(self, final: bool) -> Piece | None:
        tags = (*ENDS, START)
        hit = first_tag(self._buffer, tags)
        if hit is None:
            kept = 0 if final else partial_tag(self._buffer, tags)
            return self._take("body", len(self._buffer) - kept)
        if hit[0]:
            return self._take("body", hit[0])
        self._state = "outside"
        if hit[1] == START:
            return Piece("end", "")
        return self._take("end", len(hit[1]))

    def _take(self, kind: Kind, size: int) -> Piece | None:
        if not size:
            return None
        text, self._buffer = self._buffer[:size], self._buffer[size:]
        return Piece(kind, text)
