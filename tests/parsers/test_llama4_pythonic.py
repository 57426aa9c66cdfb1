from __future__ import annotations

import pytest
from recorded_outputs import EMPTY, Recorded, broken, check

from jaxserve.parsers import ParserNames

PARIS = ("get_weather", '{"city": "Paris", "days": 3}')
OUTPUTS = [
    broken("Plain text [1]."),
    Recorded('[get_weather(city="Paris", days=3)]', calls=[PARIS]),
    Recorded("\n[get_weather(city='Paris',days=3), now()]\n", calls=[PARIS, EMPTY]),
    Recorded("<|python_start|>[now()]<|python_end|>", calls=[EMPTY]),
    Recorded("Well: <|python_start|> [ now ( ) ] <|python_end|>", "Well:", calls=[EMPTY]),
    Recorded(
        "[get_weather(city='It\\'s (a, \"b\")]', tags=['x', \"]\"], near={'a': [-1, None]}, detailed=true)]",
        calls=[
            (
                "get_weather",
                '{"city": "It\'s (a, \\"b\\")]", "tags": ["x", "]"], "near": {"a": [-1, null]}, "detailed": true}',
            )
        ],
    ),
    Recorded(
        "[get_weather(city='a' 'b',,)]", ",)]", calls=[("get_weather", '{"city": "ab"')], complete=False
    ),
    Recorded("[now()] and text", "and text", calls=[EMPTY]),
    Recorded("[now()]<|python_e", calls=[EMPTY]),
]
BROKEN = [
    broken("[launch()]"),
    broken("[1, 2, 3]"),
    broken("[get_weather('Paris')]"),
    broken("[get_weather(city=open('x'))]"),
    broken("[get_weather(city=f(x)]"),
    broken("[get_weather(days=1e999)]"),
    broken("[now(]"),
    broken("[now"),
    broken("["),
    broken("<|python_start|>print(1)<|python_end|>"),
    broken("[" + "x" * 300),
    Recorded("[now(), launch()]", ", launch()]", calls=[EMPTY]),
    Recorded(
        "[get_weather(city='Paris', city='Rome')]",
        "city='Rome')]",
        calls=[("get_weather", '{"city": "Paris"')],
        complete=False,
    ),
    Recorded(
        "[get_weather(city='Paris', days", "days", calls=[("get_weather", '{"city": "Paris"')], complete=False
    ),
]


@pytest.mark.parametrize("recorded", OUTPUTS + BROKEN)
def test_every_split(recorded: Recorded):
    check(ParserNames(tool="llama4_pythonic"), recorded)
