from __future__ import annotations

import pytest
from recorded_outputs import EMPTY, NESTED, PARIS, Recorded, broken, check

from jaxserve.parsers import ParserNames

START, END = "<|start|>assistant", "<|end|>"


def analysis(text: str) -> str:
    return f"<|channel|>analysis<|message|>{text}"


def final(text: str) -> str:
    return f"<|channel|>final<|message|>{text}"


def to(call: tuple[str, str], end: str = "<|call|>") -> str:
    return f"<|channel|>commentary to=functions.{call[0]} <|constrain|>json<|message|>{call[1]}{end}"


BOTH = [
    Recorded("No messages at all: <|, to=x.", "No messages at all: <|, to=x."),
    Recorded(final("Hi."), "Hi."),
    Recorded(f"{analysis('Hm, <b>.')}{END}{START}{final('Hi.')}<|return|>", "Hi.", "Hm, <b>."),
    Recorded(
        f"{analysis('One.')}{END}{START}{analysis('Two.')}{END}{START}{final('Hi.')}", "Hi.", "One.\nTwo."
    ),
    Recorded(f"{analysis('Hm.')}{END}{START}{to(PARIS, '')}", "", "Hm.", calls=[PARIS]),
    Recorded(
        f"{analysis('Hm.')}{END}{START}{to(NESTED)}{START}{to(EMPTY)}", "", "Hm.", calls=[NESTED, EMPTY]
    ),
    Recorded(
        f"{analysis('Hm.')}{END}{START}<|channel|>commentary<|message|>I look.{END}{START}{to(PARIS)}",
        "I look.",
        "Hm.",
        calls=[PARIS],
    ),
    Recorded(" to=functions.now<|channel|>commentary <|constrain|>json<|message|>{}<|call|>", calls=[EMPTY]),
    Recorded(
        f"{analysis('Hm.')}{START} to=functions.now<|channel|>commentary json<|message|>{{}}",
        "",
        "Hm.",
        calls=[EMPTY],
    ),
    Recorded(analysis("Cut wit"), "", "Cut wit"),
    Recorded(f"{analysis('x')}<|end", "", "x<|end"),
    Recorded(f"{START}{to(('launch', '{}'))}"),
    Recorded(f"{START}{to(('now', 'oops'))} and"),
    Recorded(f"{START}<|channel|>commentary to=functions.now<|message|>{{"),
    Recorded(
        f'{START}<|channel|>commentary to=functions.get_weather<|message|>{{"days": 1',
        calls=[("get_weather", '{"days": 1')],
        complete=False,
    ),
    Recorded(
        f'{START}<|channel|>commentary to=functions.now<|message|>{{"a": x{END}',
        f"x{END}",
        calls=[("now", '{"a": ')],
        complete=False,
    ),
    Recorded("<|channel|>fin"),
    Recorded("<|start|>" + "x" * 600),
]
TOOLS_ONLY = [
    Recorded(f"{analysis('Hm.')}{END}{START}{final('Hi.')}", "Hm.\nHi."),
    Recorded(f"{analysis('Hm.')}{END}{START}{to(PARIS)}", "Hm.", calls=[PARIS]),
    broken("Plain text."),
]


@pytest.mark.parametrize("recorded", BOTH)
def test_every_split(recorded: Recorded):
    if not (recorded.content or recorded.reasoning or recorded.calls):
        recorded = broken(recorded.text)  # no call, so all of it is shown
    check(ParserNames("gpt_oss", "gpt_oss"), recorded)


@pytest.mark.parametrize("recorded", TOOLS_ONLY)
def test_every_split_without_a_reasoning_parser(recorded: Recorded):
    check(ParserNames("gpt_oss"), recorded)


def test_calls_are_shown_where_there_is_no_tool_parser():
    text = f"{analysis('Hm.')}{END}{START}{to(PARIS)}"
    check(ParserNames(reasoning="gpt_oss"), Recorded(text, f"{START}{to(PARIS)}", "Hm."))
