from __future__ import annotations

import pytest
from recorded_outputs import EMPTY, Recorded, broken, check

from jaxserve.parsers import ParserNames

BEGIN, END, Q = "<start_function_call>", "<end_function_call>", "<escape>"
OUTPUTS = [
    broken("Plain <start text."),
    Recorded(f"{BEGIN}call:now{{}}{END}", calls=[EMPTY]),
    Recorded(
        f"{BEGIN}call:get_weather{{city:{Q}Paris, {{x}}{Q},days:3}}{END}",
        calls=[("get_weather", '{"city": "Paris, {x}", "days": 3}')],
    ),
    Recorded(
        f"Ok.{BEGIN}call:get_weather{{near:{{a:[1, -2.5,{Q}]{Q}],b:null}}, detailed:true, units:metric}}{END}"
        f"{BEGIN}call:now{{}}{END}",
        "Ok.",
        calls=[
            (
                "get_weather",
                '{"near": {"a": [1, -2.5, "]"], "b": null}, "detailed": true, "units": "metric"}',
            ),
            EMPTY,
        ],
    ),
    Recorded(
        '<|tool_call>call:get_weather{city:<|"|>Paris<|"|>}<tool_call|>',
        calls=[("get_weather", '{"city": "Paris"}')],
    ),
    Recorded(f"{BEGIN}call:now{{}}", calls=[EMPTY]),
    broken(f"{BEGIN}call:launch{{}}{END}"),
    broken(f"{BEGIN}call:now{{city:{Q}Par"),
    broken(f"{BEGIN}now{{}}{END} text"),
    broken(f"{BEGIN}call:now{{a:1 b:2}}{END}"),
    broken(f"{BEGIN}call:now{{" + "a:{" * 200 + f"{END}"),
    broken(f"{BEGIN}call:now[]{END}"),
]


@pytest.mark.parametrize("recorded", OUTPUTS)
def test_every_split(recorded: Recorded):
    check(ParserNames(tool="gemma"), recorded)
