"""What syntaxes are read with: tags that may arrive in parts, and JSON values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

MAX_DEPTH = 128
"""Arrays and objects inside each other in a call's arguments."""


def partial_tag(text: str, tags: Iterable[str]) -> int:
    """How many characters at the end of ``text`` may be the beginning of one of ``tags``."""
    longest = 0
    for tag in tags:
        for size in range(min(len(tag) - 1, len(text)), longest, -1):
            if tag.startswith(text[-size:]):
                longest = size
                break
    return longest


def first_tag(text: str, tags: Sequence[str], start: int = 0) -> tuple[int, str] | None:
    """Where the first of ``tags`` stands, and which (the longest one of those that begin there)."""
    found = [(text.find(tag, start), -len(tag), tag) for tag in tags]
    hits = [hit for hit in found if hit[0] >= 0]
    if not hits:
        return None
    position, _, tag = min(hits)
    return position, tag


SPACE = " \t\n\r"
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_LITERAL_CHARS = re.compile(r"[A-Za-z0-9+\-.]*")
_LITERAL = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


class JsonScanner:
    """Recognizes one JSON value, from pieces of any size.

    ``out`` collects the value's text as far as it is decided; take it by ``take``. Control characters inside
    strings, which models write and JSON forbids, come out escaped.
    """

    __slots__ = ("_escape", "_expect", "_in_string", "_literal", "_out", "_stack", "done", "failed")

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._out: list[str] = []
        self._stack: list[str] = []
        self._expect = "value"
        self._in_string = False
        self._escape = ""
        self._literal = ""

    @property
    def pending(self) -> str:
        """What was read and is not decided: a part of a number, constant or escape."""
        return self._literal + self._escape

    def take(self) -> str:
        """What was decided since the last call."""
        out, self._out = "".join(self._out), []
        return out

    def feed(self, text: str, position: int = 0) -> int:
        """Read on from ``position``; where it stopped: the end, after the value, or at what is not JSON."""
        while position < len(text) and not self.done and not self.failed:
            if self._in_string:
                position = self._string(text, position)
            elif self._literal:
                position = self._go_on_literal(text, position)
            elif text[position] in SPACE:
                self._out.append(text[position])
                position += 1
            elif self._token(text[position]):
                position += 1
        return position

    def finish(self) -> None:
        """Nothing more comes: a number at the top level ends here."""
        if self._literal and not self._stack:
            self._end_literal()

    def _token(self, char: str) -> bool:
        """Take one character between values; False if it is not consumed."""
        expect = self._expect
        if expect == "colon":
            return self._simple(char, ":", "value")
        if char in "]}" and expect in ("comma", "first key", "first value"):
            return self._close(char)
        if expect == "comma":
            return self._simple(char, ",", "key" if self._stack[-1] == "{" else "value")
        if char == '"':
            self._in_string = True
            self._out.append(char)
            return True
        if expect in ("key", "first key"):
            return self._fail()
        if char in "{[":
            if len(self._stack) == MAX_DEPTH:
                return self._fail()
            self._stack.append(char)
            self._out.append(char)
            self._expect = "first key" if char == "{" else "first value"
            return True
        if char == "-" or (char.isascii() and char.isalnum()):
            self._literal = char
            return True
        return self._fail()

    def _simple(self, char: str, wanted: str, then: str) -> bool:
        if char != wanted:
            return self._fail()
        self._out.append(char)
        self._expect = then
        return True

    def _close(self, char: str) -> bool:
        if self._stack[-1] != ("{" if char == "}" else "["):
            return self._fail()
        self._stack.pop()
        self._out.append(char)
        self._after_value()
        return True

    def _string(self, text: str, position: int) -> int:
        if self._escape:
            return position + self._go_on_escape(text[position])
        match = _PLAIN.match(text, position)
        assert match is not None
        self._out.append(match[0])
        position = match.end()
        if position == len(text):
            return position
        char = text[position]
        if char == "\\":
            self._escape = char
        elif char == '"':
            self._out.append(char)
            self._in_string = False
            if self._expect in ("key", "first key"):
                self._expect = "colon"
            else:
                self._after_value()
        else:
            self._out.append(json.dumps(char)[1:-1])
        return position + 1

    def _go_on_escape(self, char: str) -> int:
        escape = self._escape + char
        if len(escape) == 2:
            complete, legal = char in _ESCAPES, char in _ESCAPES or char == "u"
        else:
            complete, legal = len(escape) == 6, char in _HEX
        if not legal:
            self.failed = True
            return 0  # the escape stays pending
        self._escape = "" if complete else escape
        if complete:
            self._out.append(escape)
        return 1

    def _go_on_literal(self, text: str, position: int) -> int:
        match = _LITERAL_CHARS.match(text, position)
        assert match is not None
        self._literal += match[0]
        if match.end() < len(text):
            self._end_literal()
        return match.end()

    def _end_literal(self) -> None:
        if _LITERAL.fullmatch(self._literal) is None:
            self.failed = True
            return
        self._out.append(self._literal)
        self._literal = ""
        self._after_value()

    def _after_value(self) -> None:
        self._expect = "comma"
        self.done = not self._stack

    def _fail(self) -> bool:
        self.failed = True
        return False
