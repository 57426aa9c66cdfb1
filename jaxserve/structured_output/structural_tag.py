"""Structural tags: free text in which tagged parts follow a grammar of their own, as one Lark grammar.

Two forms are read: ``{"structures": [{"begin", "schema", "end"}], "triggers": […]}``, and ``{"format": {…}}`` with
the types named in ``_FORMATS``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

from llguidance import regex_to_lark

from jaxserve.structured_output.interface import GrammarError

_TEXT = r"/(.|\n)*/"
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"
"""Optional white space in JSON: as much as an indented line needs, not as much as a model that has lost its way."""
_NOTHING = '""'


def structural_tag_grammar(tag: dict[str, Any], special_tokens: Sequence[str]) -> str:
    """The Lark grammar of a structural tag.

    Args:
        tag: as the request brought it.
        special_tokens: spellings of tokens that are no text; where a tag's begin or end holds one, that token is
            meant.

    Raises:
        GrammarError: a part is missing, of the wrong type, or not supported.
    """
    if tag.get("type") != "structural_tag":
        raise GrammarError('needs "type": "structural_tag".')
    writer = _Writer(special_tokens)
    if "format" in tag:
        body = writer.format(_get(tag, "format", dict))
    else:
        body = writer.triggered_tags(_from_structures(tag))
    return writer.grammar(body)


def _from_structures(tag: dict[str, Any]) -> dict[str, Any]:
    tags: list[dict[str, Any]] = []
    for structure in _get(tag, "structures", list):
        if not isinstance(structure, dict):
            raise GrammarError("structures must be objects.")
        schema = cast("dict[str, Any]", structure).get("schema")
        content = {"type": "json_schema", "json_schema": {} if schema is None else schema}
        tags.append({**structure, "content": content})
    return {"triggers": tag.get("triggers"), "tags": tags}


def _get(value: dict[str, Any], name: str, kind: type) -> Any:
    item = value.get(name)
    if not isinstance(item, kind) or (not item and kind is list):
        raise GrammarError(f"needs {name!r} ({kind.__name__}), got {str(item)[:40]!r}.")
    return item


class _Writer:
    """Collects the rules of one grammar."""

    def __init__(self, special_tokens: Sequence[str]) -> None:
        longest_first = sorted(filter(None, special_tokens), key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._rules: list[str] = []

    def grammar(self, start: str) -> str:
        """The whole grammar."""
        return "\n".join(
            ["%llguidance {}", f"start: {start or _NOTHING}", *self._rules, f"TAG_TEXT: {_TEXT}", ""]
        )

    def literal(self, text: str) -> str:
        """``text``, with special tokens as such."""
        parts: list[str] = []
        at = 0
        for found in self._special.finditer(text):
            parts += [_quoted(text[at : found.start()]), _special_token(found[0])]
            at = found.end()
        return " ".join(filter(None, [*parts, _quoted(text[at:])]))

    def _rule(self, body: str) -> str:
        name = f"part_{len(self._rules)}"
        self._rules.append(f"{name}: {body or _NOTHING}")
        return name

    def format(self, value: dict[str, Any]) -> str:
        """The expression of one ``format``."""
        kind = value.get("type")
        writer = _FORMATS.get(kind) if isinstance(kind, str) else None
        if writer is None:
            raise GrammarError(
                f"has a format of type {str(kind)[:40]!r}; {', '.join(_FORMATS)} are supported."
            )
        return writer(self, value)

    def _inner(self, value: Any) -> str:
        if not isinstance(value, dict):
            raise GrammarError("formats must be objects.")
        return self.format(cast("dict[str, Any]", value))

    def const_string(self, value: dict[str, Any]) -> str:
        return self.literal(_get(value, "value", str))

    def json_schema(self, value: dict[str, Any]) -> str:
        schema = value.get("json_schema")
        if not isinstance(schema, (dict, bool)):
            raise GrammarError("needs 'json_schema' (object).")
        return self._rule("%json " + json.dumps(_with_bounded_whitespace(schema)))

    def regex(self, value: dict[str, Any]) -> str:
        pattern = _get(value, "pattern", str)
        return f"/{regex_to_lark(pattern, 'd')}/"

    def any_text(self, _value: dict[str, Any]) -> str:
        return "TAG_TEXT"

    def sequence(self, value: dict[str, Any]) -> str:
        return self._rule(" ".join(self._inner(item) for item in _get(value, "elements", list)))

    def either(self, value: dict[str, Any]) -> str:
        return self._rule(" | ".join(self._inner(item) for item in _get(value, "elements", list)))

    def tag(self, value: dict[str, Any]) -> str:
        begin, end = self.literal(_get(value, "begin", str)), self.literal(_get(value, "end", str))
        return self._rule(f"{begin} {self._content(value, end)}")

    def _content(self, value: dict[str, Any], end: str) -> str:
        """What stands between begin and end, and the end. Free text is up to the first end."""
        content = _get(value, "content", dict)
        if content.get("type") == "any_text" and end:
            name = f"part_{len(self._rules)}"
            if end.startswith('"'):
                self._rules.append(f"{name}[lazy]: TAG_TEXT {end}")
                return name
            return f"TAG_TEXT {end}"
        return f"{self._inner(content)} {end}"

    def triggered_tags(self, value: dict[str, Any]) -> str:
        """Free text; a trigger in it must begin one of the tags."""
        triggers = _get(value, "triggers", list)
        by_trigger: dict[str, list[str]] = {}
        for item in _get(value, "tags", list):
            if not isinstance(item, dict):
                raise GrammarError("tags must be objects.")
            tag = cast("dict[str, Any]", item)
            begin = _get(tag, "begin", str)
            trigger = next((t for t in triggers if isinstance(t, str) and t and begin.startswith(t)), None)
            if trigger is None:
                raise GrammarError(f"has the tag {begin[:80]!r}, which begins with none of its triggers.")
            end = self.literal(_get(tag, "end", str))
            rest = self.literal(begin[len(trigger) :])
            by_trigger.setdefault(trigger, []).append(self._rule(f"{rest} {self._content(tag, end)}"))
        heads = [f"{self._trigger(trigger)} ({' | '.join(rules)})" for trigger, rules in by_trigger.items()]
        tags = "(" + " | ".join(heads) + ")"
        if value.get("stop_after_first"):
            return tags if value.get("at_least_one") else f"({tags} | TAG_TEXT)"
        return f"{tags}{'+' if value.get('at_least_one') else '*'} TAG_TEXT"

    def _trigger(self, trigger: str) -> str:
        """Text up to and with a trigger; the first one in the text counts."""
        text = self.literal(trigger)
        if not text.startswith('"'):
            return f"TAG_TEXT {text}"
        first, _, rest = text.partition('" ')
        name = f"trigger_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: TAG_TEXT {first + chr(34) if rest else first}")
        return f"{name} {rest}"


def _with_bounded_whitespace(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """``schema`` with the default for white space that schemas have elsewhere."""
    inner: dict[str, Any] = {} if schema is True else {"enum": []} if schema is False else schema
    return {**inner, "x-guidance": inner.get("x-guidance", {"whitespace_pattern": WHITESPACE})}


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _special_token(text: str) -> str:
    """Lark's spelling of a special token: ``<…>`` is its own name."""
    if re.fullmatch(r"<[\w|.\-]+>", text):
        return text
    raise GrammarError(f"holds the special token {text!r}, whose name cannot be written in a grammar.")


_FORMATS: dict[str, Callable[[_Writer, dict[str, Any]], str]] = {
    "const_string": _Writer.const_string,
    "json_schema": _Writer.json_schema,
    "regex": _Writer.regex,
    "any_text": _Writer.any_text,
    "sequence": _Writer.sequence,
    "or": _Writer.either,
    "tag": _Writer.tag,
    "triggered_tags": _Writer.triggered_tags,
}
