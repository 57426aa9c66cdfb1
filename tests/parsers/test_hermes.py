from __future__ import annotations

import pytest
from recorded_outputs import EMPTY, NESTED, PARIS, Recorded, broken, check, json_call

from jaxserve.parsers import ParserNames

OUTPUTS = [
    broken("Just text, <tool> and {braces}, a < b.\n\n"),
    Recorded(f"<tool_call>\n{json_call(PARIS)}\n</tool_call>", calls=[PARIS]),
    Recorded(
        f"I'll look.\n<tool_call>\n{json_call(NESTED)}\n</tool_call>\n<tool_call>\n{json_call(EMPTY)}\n</tool_call>\n",
        "I'll look.",
        calls=[NESTED, EMPTY],
    ),
    Recorded(f"<tool_call>{json_call(PARIS)}{json_call(EMPTY)}</tool_call>", calls=[PARIS, EMPTY]),
    Recorded(
        '<tool_call>{"arguments": {"city": "Paris", "days": 3}, "name": "get_weather"}</tool_call>',
        calls=[PARIS],
    ),
    Recorded('<tool_call>{"name": "now"}</tool_call> Done.', "Done.", calls=[EMPTY]),
    Recorded('<tool_call>{"name": "now", "arguments": null}</tool_call>', calls=[EMPTY]),
    Recorded(
        '<tool_call>{"name": "get_weather", "arguments": "{\\"days\\": 3}"}</tool_call>',
        calls=[("get_weather", '{"days": 3}')],
    ),
    Recorded(  # line breaks within strings, further keys, one brace too many
        '<tool_call>{"id": "x", "name": "run.code", "arguments": {"code": "a\nb\t"}, "more": [1]}}</tool_call>',
        calls=[("run.code", '{"code": "a\\nb\\t"}')],
    ),
    Recorded(f"<tool_call>\n{json_call(PARIS)}", calls=[PARIS]),
    Recorded(f"<tool_call>\n{json_call(PARIS)[:-1]}", calls=[PARIS]),
    Recorded(f"<tool_call>\n{json_call(PARIS)}\n</tool_", calls=[PARIS]),
    Recorded(f"<tool_call>\n{json_call(PARIS)}\n</tool_call> a <", "a <", calls=[PARIS]),
]
BROKEN = [
    broken('<tool_call>\n{"name": "launch", "arguments": {}}\n</tool_call>'),
    broken("<tool_call>\nget_weather(city='Paris')\n</tool_call>"),
    broken("<tool_call>{'name': 'now'}</tool_call>"),
    broken('<tool_call>{"name": "now", "arguments": {\'a\': 1}}</tool_call>'),
    broken('<tool_call>{"name": "now", "arguments": [1]}</tool_call>'),
    broken('<tool_call>{"name": "now", "arguments": 07}</tool_call>'),
    broken('<tool_call>{"name": "now", "arguments": "{"}</tool_call>'),
    broken('<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    broken('<tool_call>{"name": "now", "name": "now"}'),
    broken('<tool_call>{"name" "now"}</tool_call>'),
    broken('<tool_call>{"arguments": {"a": 1}}</tool_call>'),
    broken('<tool_call>{"name": "no'),
    broken("<tool_call>"),
    broken("<tool_call></tool_call>"),
    broken("text <tool_ca"),
    broken(f'<tool_call>{{"name": "{"x" * 300}'),
]
CUT = [
    Recorded(
        '<tool_call>{"name": "get_weather", "arguments": {"city": "Par',
        calls=[("get_weather", '{"city": "Par')],
        complete=False,
    ),
    Recorded(
        '<tool_call>{"name": "get_weather", "arguments": {"days": 12',
        calls=[("get_weather", '{"days": 12')],
        complete=False,
    ),
    Recorded(
        '<tool_call>{"name": "get_weather", "arguments": {"city": "\\u00e',
        calls=[("get_weather", '{"city": "\\u00e')],
        complete=False,
    ),
    Recorded(
        '<tool_call>{"name": "get_weather", "arguments": {"detailed": True}}</tool_call>',
        "True}}</tool_call>",
        calls=[("get_weather", '{"detailed": ')],
        complete=False,
    ),
    Recorded(
        '<tool_call>{"name": "get_weather", "arguments": {"city": "\\x"}}</tool_call> and more',
        '\\x"}}</tool_call> and more',
        calls=[("get_weather", '{"city": "')],
        complete=False,
    ),
    Recorded(
        f"<tool_call>{json_call(EMPTY)[:-1]}, 'oops'}}</tool_call> {json_call(EMPTY)}",
        f", 'oops'}}</tool_call> {json_call(EMPTY)}",
        calls=[EMPTY],
    ),
]


@pytest.mark.parametrize("recorded", OUTPUTS + BROKEN + CUT)
def test_every_split(recorded: Recorded):
    check(ParserNames(tool="hermes"), recorded)
