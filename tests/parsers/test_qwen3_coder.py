from __future__ import annotations

import pytest
from recorded_outputs import EMPTY, Recorded, broken, check

from jaxserve.parsers import ParserNames


def function(name: str, **values: str) -> str:
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<function={name}>\n{parameters}</function>"


def wrapped(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


PARIS = function("get_weather", city="Paris", days="3")
CODE = 'if a < b and "c" in d:\n\tprint("</param>")\n\n<parameter'
OUTPUTS = [
    broken("Plain <tool_call text, <b>, 1 < 2."),
    Recorded(wrapped(PARIS), calls=[("get_weather", '{"city": "Paris", "days": 3}')]),
    Recorded(PARIS, calls=[("get_weather", '{"city": "Paris", "days": 3}')]),
    Recorded(
        f"I look.\n\n{wrapped(PARIS)}\n{wrapped(function('now'))}",
        "I look.",
        calls=[("get_weather", '{"city": "Paris", "days": 3}'), EMPTY],
    ),
    Recorded(
        wrapped(function("run.code", code=CODE)),
        calls=[
            ("run.code", '{"code": "if a < b and \\"c\\" in d:\\n\\tprint(\\"</param>\\")\\n\\n<parameter"}')
        ],
    ),
    Recorded(
        wrapped(
            function("get_weather", city="7", days="seven", detailed="True", tags='["a", "b"]', note="null")
        ),
        calls=[
            (
                "get_weather",
                '{"city": "7", "days": "seven", "detailed": true, "tags": ["a", "b"], "note": null}',
            )
        ],
    ),
    Recorded(
        wrapped(
            function("get_weather", units="metric", note="5", either="5", anything="{'a': 1}", extra="NaN")
        ),
        calls=[
            (
                "get_weather",
                '{"units": "metric", "note": "5", "either": 5, "anything": "{\'a\': 1}", "extra": "NaN"}',
            )
        ],
    ),
    Recorded(
        wrapped("<function=run.code>\n<parameter=code></parameter></function>"),
        calls=[("run.code", '{"code": ""}')],
    ),
    Recorded(
        wrapped("<function=run.code>\n<parameter=code>\n\n</parameter></function>"),
        calls=[("run.code", '{"code": ""}')],
    ),
    Recorded(f"{PARIS}\n</tool", calls=[("get_weather", '{"city": "Paris", "days": 3}')]),
]
BROKEN = [
    broken(wrapped(function("launch", city="Paris"))),
    broken(wrapped('{"name": "now", "arguments": {}}')),
    broken(wrapped("<function=now> oops </function>")),
    broken("<function=" + "x" * 300),
    broken("<tool_call>\n<function=now"),
    broken("<tool_call>"),
    broken("<function=now>\n<parameter=city"),
    Recorded(
        "<function=get_weather><parameter=city>\nParis\n</parameter> oops </function>",
        "oops </function>",
        calls=[("get_weather", '{"city": "Paris"')],
        complete=False,
    ),
    Recorded(
        "<function=get_weather>\n<parameter=city>\nPar",
        calls=[("get_weather", '{"city": "Par')],
        complete=False,
    ),
]


@pytest.mark.parametrize("recorded", OUTPUTS + BROKEN)
def test_every_split(recorded: Recorded):
    check(ParserNames(tool="qwen3_coder"), recorded)
