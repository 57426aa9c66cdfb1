"""Gemma's tool calls: ``<start_function_call>call:name{key:<escape>text<escape>,n:1}<end_function_call>``.

This is FunctionGemma's form. Gemma 4 writes the same between ``<|tool_call>`` and ``<tool_call|>``, its strings
between ``<|"|>``. Gemma 3 has no syntax of its own: it is told one in the prompt
(``tokenizer/prompted_tools.py``).
"""

from __future__ import annotations

import json
import re
from typing import Any

from jaxserve.parsers.interface import ToolParser
from jaxserve.parsers.scan import MAX_DEPTH

_ENDS = {"<start_function_call>": "<end_function_call>", "<|tool_call>": "<tool_call|>"}
_QUOTES = {"<start_function_call>": "<escape>", "<|tool_call>": '<|"|>'}
_HEADER = re.compile(r"\s*call:([\w.-]+)\s*(?=\{)")
_KEY = re.compile(r"\s*([^\s:{}\[\],]+)\s*:")
_LITERAL = re.compile(r"\s*([^\s,{}\[\]]+)\s*")


class GemmaParser(ToolParser):
    """A call is read when its end has come: only then is it known that it is one."""

    special_tokens = (*_ENDS, *_ENDS.values(), *_QUOTES.values())

    _tag = ""
    """The opening tag of the call that is being read."""
    _searched = 0
    """How much of the buffer holds no end."""

    def _advance(self, *, final: bool) -> None:
        while self._buffer:
            before = (len(self._buffer), self._tag)
            if self._tag:
                self._inside(final=final)
            else:
                self._outside(final=final)
            if before == (len(self._buffer), self._tag):
                break
        if final and self._tag:
            self._content(self._tag)
            self._tag = ""

    def _outside(self, *, final: bool) -> None:
        self._tag = self._take_tag(tuple(_ENDS), final=final) or ""
        self._searched = 0

    def _inside(self, *, final: bool) -> None:
        end = _ENDS[self._tag]
        position = self._buffer.find(end, self._searched)
        if position < 0 and not final:
            self._searched = max(0, len(self._buffer) - len(end))
            return
        body = self._buffer if position < 0 else self._buffer[:position]
        call = _read_call(body, _QUOTES[self._tag])
        if call is None or call[0] not in self.tools:
            self._content(self._tag + body + ("" if position < 0 else end))
        else:
            self._start(call[0])
            self._arguments(json.dumps(call[1], ensure_ascii=False))
        self._buffer = "" if position < 0 else self._buffer[position + len(end) :]
        self._tag = ""


def _read_call(body: str, quote: str) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments; None if the body is not a call."""
    header = _HEADER.match(body)
    if header is None:
        return None
    reader = _Reader(body, header.end(), quote)
    try:
        value = reader.value(0)
    except ValueError:
        return None
    return (header[1], value) if isinstance(value, dict) and not body[reader.position :].strip() else None


class _Reader:
    """Reads a value of the syntax; raises ValueError where there is none."""

    def __init__(self, text: str, position: int, quote: str) -> None:
        self.position = position
        self._text = text
        self._quote = quote

    def value(self, depth: int) -> Any:
        self._skip_space()
        if depth > MAX_DEPTH:
            raise ValueError("nested too deeply")
        if self._take("{"):
            return dict(self._items("}", depth, keys=True))
        if self._take("["):
            return [value for _, value in self._items("]", depth, keys=False)]
        if self._take(self._quote):
            end = self._text.index(self._quote, self.position)
            text = self._text[self.position : end]
            self.position = end + len(self._quote)
            return text
        return _literal(self._match(_LITERAL))

    def _items(self, end: str, depth: int, *, keys: bool) -> list[tuple[str, Any]]:
        items: list[tuple[str, Any]] = []
        self._skip_space()
        while not self._take(end):
            if items and not self._take(","):
                raise ValueError("a comma is missing")
            key = self._match(_KEY).removeprefix(self._quote).removesuffix(self._quote) if keys else ""
            items.append((key, self.value(depth + 1)))
            self._skip_space()
        return items

    def _take(self, token: str) -> bool:
        found = self._text.startswith(token, self.position)
        self.position += len(token) * found
        return found

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self.position)
        if match is None:
            raise ValueError("no value")
        self.position = match.end()
        return match[1]

    def _skip_space(self) -> None:
        while self._text[self.position : self.position + 1].isspace():
            self.position += 1


def _literal(text: str) -> Any:
    """A number or constant; any other word is a string."""
    try:
        value: Any = json.loads(text)
    except ValueError:
        return text
    return (
        text
        if (isinstance(value, float) and value in (float("inf"), float("-inf"))) or value != value
        else value
    )
