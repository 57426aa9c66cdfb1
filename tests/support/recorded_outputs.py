"""Outputs as models write them, what they say, and the check that every way to split them says the same."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.parsers import (
    ContentDelta,
    OutputDelta,
    OutputParser,
    ParsedOutput,
    ParserNames,
    ParserSet,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
    parse_output,
)

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"enum": ["metric", "imperial"]},
            "detailed": {"type": "boolean"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "near": {"type": "object"},
            "note": {"type": ["string", "null"]},
            "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "anything": {},
        },
    },
    "now": {"type": "object", "properties": {}},
    "run.code": {"type": "object", "properties": {"code": {"type": "string"}}},
}
PARIS = ("get_weather", '{"city": "Paris", "days": 3}')
NESTED = (
    "get_weather",
    '{"city": "Zürich \\"Süd\\" \\ud83c\\udf27", "tags": ["a,b", "}]"], "near": {"x": [1.5e3, -2, null, true]}}',
)
EMPTY = ("now", "{}")

Call = tuple[str, str]


@dataclass(frozen=True)
class Recorded:
    """An output and what it says.

    ``calls``: names and arguments. ``complete`` is False where the output was cut within a call, or the call
    breaks off: its arguments need not be JSON then.
    """

    text: str
    content: str = ""
    reasoning: str = ""
    calls: Sequence[Call] = ()
    prompt: str = ""
    complete: bool = True


def broken(text: str, **changes: str) -> Recorded:
    """An output without a call that can be read: all of it is content."""
    return Recorded(text, changes.get("content", text))


def json_call(call: Call, key: str = "arguments") -> str:
    """A call as most models write it."""
    return f'{{"name": "{call[0]}", "{key}": {call[1]}}}'


def check(names: ParserNames, recorded: Recorded) -> None:
    """The whole parse is as recorded, and the deltas of every split add up to it."""
    parsers = ParserSet(names, None)

    def new() -> OutputParser:
        return parsers.create(recorded.prompt, tools=TOOLS)

    text = recorded.text
    whole = parse_output(new(), text)
    assert said(whole) == (recorded.content, recorded.reasoning, list(recorded.calls))
    if recorded.complete:
        for call in whole.tool_calls:
            assert isinstance(json.loads(call.arguments), dict)

    check_split(new(), list(text), whole)
    for at in range(1, len(text)):
        check_split(new(), [text[:at], text[at:]], whole)

    @settings(max_examples=15, deadline=None, database=None, derandomize=True)
    @given(st.sets(st.integers(0, len(text)), max_size=12))
    def random_splits(cuts: set[int]) -> None:
        edges = [0, *sorted(cuts), len(text)]
        check_split(new(), [text[a:b] for a, b in itertools.pairwise(edges)], whole)

    random_splits()


def check_split(parser: OutputParser, pieces: Iterable[str], whole: ParsedOutput) -> None:
    """The deltas of ``pieces`` add up to ``whole``, each call being announced once, before its arguments."""
    deltas: list[OutputDelta] = []
    for piece in pieces:
        deltas += parser.feed(piece)
    deltas += parser.finish()
    streamed = ParsedOutput()
    streamed.add(deltas)
    assert said(streamed) == said(whole)
    check_order(deltas)


def check_order(deltas: Iterable[OutputDelta]) -> None:
    """Calls begin in order, once, and only the last one begun gets arguments; no delta is empty."""
    ids: list[str] = []
    for delta in deltas:
        match delta:
            case ToolCallStart(index, call_id, name):
                assert index == len(ids)
                assert call_id not in ids
                assert name
                ids.append(call_id)
            case ToolCallDelta(index, arguments):
                assert index == len(ids) - 1
                assert arguments
            case ContentDelta(text) | ReasoningDelta(text):
                assert text


def said(output: ParsedOutput) -> tuple[str, str, list[Call]]:
    """All but the ids."""
    return output.content, output.reasoning, [(call.name, call.arguments) for call in output.tool_calls]
