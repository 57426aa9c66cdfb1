"""Qwen 3 Coder's tool calls: ``<tool_call><function=name><parameter=key>value</parameter>…</function></tool_call>``.

Values are plain text between line breaks; the tool's schema says what they are. Strings are streamed.
"""

from __future__ import annotations

import json
from typing import Any, cast

from jaxserve.parsers.call_readers import MAX_NAME
from jaxserve.parsers.interface import ToolParser
from jaxserve.parsers.scan import first_tag, partial_tag

_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


class Qwen3CoderParser(ToolParser):
    """The outer tags may be missing."""

    special_tokens = (_CALL, _CALL_END)

    _state = "outside"
    _raw = ""
    """What was read since the opening tag, until the call has started: content if it turns out to be none."""
    _name = ""
    _key = ""
    _keys: frozenset[str] = frozenset()
    _value = ""
    """What was read of a value that is not a string."""
    _as_text = False
    """Whether the value is a string, which is streamed."""
    _begun = False
    """Whether a character of the value was read."""

    def _advance(self, *, final: bool) -> None:
        while self._buffer:
            before = (len(self._buffer), self._state)
            getattr(self, f"_read_{self._state}")(final=final)
            if before == (len(self._buffer), self._state):
                break
        if final:
            self._leave()

    def _read_outside(self, *, final: bool) -> None:
        tag = self._take_tag((_CALL, _FUNCTION), final=final)
        if tag is not None:
            self._raw += tag
            self._state = "name" if tag == _FUNCTION else "call"

    def _read_call(self, *, final: bool) -> None:
        """Behind the outer tag."""
        self._skip_space()
        if self._buffer.startswith(_FUNCTION):
            self._consume(len(_FUNCTION))
            self._state = "name"
        elif final or not _FUNCTION.startswith(self._buffer):
            self._leave()

    def _read_name(self, *, final: bool) -> None:
        name = self._until_bracket(final=final)
        if name is None:
            return
        if name not in self.tools:
            self._leave()
            return
        self._consume(len(name) + 1)
        self._name, self._keys = name, frozenset()
        self._state = "body"

    def _read_body(self, *, final: bool) -> None:
        """Before a parameter, or the end of the function."""
        self._skip_space()
        text = self._buffer
        if text.startswith(_PARAMETER):
            self._consume(len(_PARAMETER))
            self._state = "key"
        elif text.startswith(_FUNCTION_END):
            self._consume(len(_FUNCTION_END))
            self._begin()
            self._arguments("}" if self._keys else "{}")
            self._state = "trailer"
        elif final or partial_tag(text, (_PARAMETER, _FUNCTION_END)) != len(text):
            self._leave()

    def _read_key(self, *, final: bool) -> None:
        key = self._until_bracket(final=final)
        if key is None:
            return
        if key in self._keys:
            self._leave()
            return
        self._consume(len(key) + 1)
        self._begin()
        self._arguments(("{" if not self._keys else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._keys |= {key}
        self._key, self._value, self._begun = key, "", False
        self._as_text = _is_text(self._schema())
        if self._as_text:
            self._arguments('"')
        self._state = "value"

    def _read_value(self, *, final: bool) -> None:
        if not self._begun and self._buffer:
            self._begun = True
            self._buffer = self._buffer.removeprefix("\n")
        ends = ("\n" + _PARAMETER_END, _PARAMETER_END)
        hit = first_tag(self._buffer, ends)
        if hit is None:
            kept = 0 if final else partial_tag(self._buffer, ends)
            shown = len(self._buffer) - kept
            self._add_to_value(self._buffer[:shown])
            self._buffer = self._buffer[shown:]
            return
        position, tag = hit
        self._add_to_value(self._buffer[:position])
        self._buffer = self._buffer[position + len(tag) :]
        self._arguments('"' if self._as_text else _to_json(self._value, self._schema()))
        self._state = "body"

    def _read_trailer(self, *, final: bool) -> None:
        text = self._buffer.lstrip()
        if text.startswith(_CALL_END):
            self._buffer = text[len(_CALL_END) :]
            self._state = "outside"
        elif not _CALL_END.startswith(text):
            self._state = "outside"
        elif final:
            self._buffer = ""

    # --- helpers ----------------------------------------------------------------------------------------

    def _add_to_value(self, text: str) -> None:
        if self._as_text:
            self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        else:
            self._value += text

    def _schema(self) -> Any:
        properties: Any = self.tools[self._name].get("properties")
        return cast("dict[str, Any]", properties).get(self._key) if isinstance(properties, dict) else None

    def _until_bracket(self, *, final: bool) -> str | None:
        """What stands before the next ``>``; None while it has not come. One that never comes leaves the call."""
        end = self._buffer.find(">", 0, MAX_NAME)
        if end >= 0:
            return self._buffer[:end]
        if final or len(self._buffer) >= MAX_NAME:
            self._leave()
        return None

    def _consume(self, size: int) -> None:
        if self._state != "body" or not self._keys:
            self._raw += self._buffer[:size]
        self._buffer = self._buffer[size:]

    def _skip_space(self) -> None:
        self._consume(len(self._buffer) - len(self._buffer.lstrip()))

    def _begin(self) -> None:
        if not self._keys:
            self._start(self._name)
        self._raw = ""

    def _leave(self) -> None:
        """What was read since the opening tag is content, unless the call has started."""
        self._content(self._raw)
        self._raw, self._state = "", "outside"


def _kinds(schema: Any) -> set[str]:
    """The types that a schema allows; empty if it does not say."""
    if not isinstance(schema, dict):
        return set()
    fields = cast("dict[str, Any]", schema)
    kind = fields.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(item) for item in cast("list[Any]", kind)}
    options: Any = fields.get("anyOf") or fields.get("oneOf")
    if isinstance(options, list):
        return set[str]().union(*(_kinds(option) for option in cast("list[Any]", options)))
    values: Any = fields.get("enum")
    if isinstance(values, list) and all(isinstance(value, str) for value in cast("list[Any]", values)):
        return {"string"}
    return set()


def _is_text(schema: Any) -> bool:
    return _kinds(schema) == {"string"}


def _to_json(text: str, schema: Any) -> str:
    """The JSON text of a value that need not be a string."""
    kinds = _kinds(schema)
    text = text.strip()
    if kinds == {"string", "null"}:
        return "null" if text in ("null", "None") else json.dumps(text, ensure_ascii=False)
    literal = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    try:
        json.loads(literal, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return literal


def _refuse(constant: str) -> Any:
    raise ValueError(constant)
