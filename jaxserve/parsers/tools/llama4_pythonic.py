"""Llama 4's tool calls: a Python list of calls with literal arguments, ``[f(a=1, b="x"), g()]``."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

from jaxserve.parsers.call_readers import MAX_NAME
from jaxserve.parsers.interface import ToolParser
from jaxserve.parsers.scan import partial_tag

_OPEN, _CLOSE = "<|python_start|>", "<|python_end|>"
_NAME = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*\(")
_ARGUMENT = re.compile(r"\s*([A-Za-z_]\w*)\s*=(.*)", re.DOTALL)
_BRACKETS = {")": "(", "]": "[", "}": "{"}


class PythonicParser(ToolParser):
    """The list is an output's first word, or stands between tags; arguments are streamed one by one."""

    special_tokens = (_OPEN, _CLOSE)

    _state = "beginning"
    _raw = ""
    """What was read since the last complete call: content if the next one turns out to be none."""
    _name = ""
    _keys: frozenset[str] = frozenset()
    _num_read = 0
    """Calls of this list."""

    def _advance(self, *, final: bool) -> None:
        while self._buffer:
            before = (len(self._buffer), self._state)
            getattr(self, f"_read_{self._state}")(final=final)
            if before == (len(self._buffer), self._state):
                break
        if final and self._state != "outside":
            self._leave()

    def _read_beginning(self, *, final: bool) -> None:
        """Before the first word."""
        text = self._buffer.lstrip()
        if text.startswith("["):
            self._open(len(self._buffer) - len(text) + 1)
        elif text and (final or len(text) >= len(_OPEN) or not _OPEN.startswith(text)):
            self._state = "outside"

    def _read_outside(self, *, final: bool) -> None:
        text = self._buffer
        before, tag, rest = text.partition(_OPEN)
        if tag:
            self._content(before)
            self._raw, self._buffer, self._state = tag, rest, "tag"
            return
        kept = 0 if final else partial_tag(text, (_OPEN,))
        self._content(text[: len(text) - kept])
        self._buffer = text[len(text) - kept :]

    def _read_tag(self, *, final: bool) -> None:
        text = self._buffer.lstrip()
        if text.startswith("["):
            self._open(len(self._buffer) - len(text) + 1)
        elif text:
            self._leave()

    def _open(self, size: int) -> None:
        self._consume(size)
        self._num_read = 0
        self._state = "name"

    def _read_name(self, *, final: bool) -> None:
        match = _NAME.match(self._buffer, 0, MAX_NAME)
        if match is not None and match[1] in self.tools:
            self._name, self._keys = match[1], frozenset()
            self._consume(match.end())
            self._state = "argument"
            self._position, self._quote, self._stack = 0, "", ""
        elif match is not None or final or len(self._buffer) >= MAX_NAME or _never_a_name(self._buffer):
            self._leave()

    _position = 0
    """How much of the buffer was read of an argument."""
    _quote = ""
    """The quote that ends the string being read; a backslash behind it escapes the next character."""
    _stack = ""
    """Brackets that are open."""

    def _read_argument(self, *, final: bool) -> None:
        while self._position < len(self._buffer):
            char = self._buffer[self._position]
            if not self._quote and not self._stack and char in ",)":
                self._end_argument(char)
                return
            if not self._scan(char):
                self._leave()
                return
            self._position += 1

    def _scan(self, char: str) -> bool:
        """Follow quotes and brackets; False where a bracket does not fit."""
        if self._quote:
            if len(self._quote) == 2:
                self._quote = self._quote[0]
            elif char == "\\":
                self._quote += char
            elif char == self._quote:
                self._quote = ""
        elif char in "\"'":
            self._quote = char
        elif char in "([{":
            self._stack += char
        elif char in _BRACKETS:
            if not self._stack.endswith(_BRACKETS[char]):
                return False
            self._stack = self._stack[:-1]
        return True

    def _end_argument(self, end: str) -> None:
        text = self._buffer[: self._position]
        if text.strip():
            found = _argument(text)
            if found is None or found[0] in self._keys:
                self._leave()
                return
            key, value = found
            if not self._keys:
                self._start(self._name)
            self._arguments(("{" if not self._keys else ", ") + f"{json.dumps(key)}: {value}")
            self._keys |= {key}
        elif end == ",":
            self._leave()
            return
        elif not self._keys:
            self._start(self._name)
            self._arguments("{")
        self._consume(self._position + 1)
        self._raw = ""
        self._position = 0
        if end == ")":
            self._arguments("}")
            self._num_read += 1
            self._state = "after"

    def _read_after(self, *, final: bool) -> None:
        """Behind a call."""
        text = self._buffer.lstrip()
        if text.startswith(","):
            self._consume(len(self._buffer) - len(text) + 1)
            self._state = "name"
        elif text.startswith("]"):
            self._buffer = text[1:]
            self._state = "closing"
        elif text:
            self._leave()

    def _read_closing(self, *, final: bool) -> None:
        text = self._buffer.lstrip()
        if text.startswith(_CLOSE):
            self._buffer = text[len(_CLOSE) :]
            self._state = "outside"
        elif text and not _CLOSE.startswith(text):
            self._state = "outside"
        elif final:
            self._buffer = ""

    def _consume(self, size: int) -> None:
        self._raw += self._buffer[:size]
        self._buffer = self._buffer[size:]

    def _leave(self) -> None:
        self._content(self._raw)
        self._raw, self._state = "", "outside"


def _never_a_name(text: str) -> bool:
    """Whether no continuation of ``text`` is a call's name and its parenthesis."""
    return re.fullmatch(r"\s*(?:[A-Za-z_][\w.-]*\s*)?", text) is None


def _argument(text: str) -> tuple[str, str] | None:
    """Key and value (as JSON text) of ``key=value``; None if it is not a literal."""
    match = _ARGUMENT.fullmatch(text)
    if match is None:
        return None
    try:
        tree = ast.parse(match[2].strip(), mode="eval")
        value: Any = ast.literal_eval(_Json().visit(tree))
        return match[1], json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


class _Json(ast.NodeTransformer):
    """JSON's constants, which models write among Python's."""

    _CONSTANTS: dict[str, bool | None] = {"true": True, "false": False, "null": None}  # noqa: RUF012

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(self._CONSTANTS[node.id]) if node.id in self._CONSTANTS else node
