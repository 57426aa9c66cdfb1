"""The syntaxes that write calls as JSON behind a tag, beside Hermes's."""

from __future__ import annotations

import re

import pytest
from recorded_outputs import EMPTY, NESTED, PARIS, TOOLS, Recorded, broken, check, json_call

from jaxserve.parsers import ParserNames, ParserSet, parse_output

LIST = f"[{json_call(PARIS)}, {json_call(EMPTY)}]"
PARAMETERS = json_call(PARIS, "parameters")

LLAMA3 = [
    broken("Plain text.\n"),
    Recorded(PARAMETERS, calls=[PARIS]),
    Recorded(f"\n {PARAMETERS}; {json_call(NESTED, 'parameters')}", calls=[PARIS, NESTED]),
    Recorded(f"<|python_tag|>{PARAMETERS}", calls=[PARIS]),
    Recorded(f"<|python_tag|>{PARAMETERS};{json_call(EMPTY)}\n", calls=[PARIS, EMPTY]),
    Recorded(f"Let me see. <|python_tag|>{PARAMETERS}", "Let me see.", calls=[PARIS]),
    Recorded('{"type": "function", "name": "now", "parameters": {}}', calls=[EMPTY]),
    Recorded(f"{PARAMETERS} There.", "There.", calls=[PARIS]),
    broken(f"As JSON: {PARAMETERS}"),
    broken('{"answer": 42, "name": "Bob"}'),
    broken('{"name": "Bob", "parameters": {}}'),
    broken('{"name": "now"'),
    broken("{}"),
    broken("<"),
    broken("<|python_tag|>print(1)"),
    broken("<|python_tag"),
]
GRANITE = [
    broken("Plain text."),
    Recorded(f"<|tool_call|>{LIST}", calls=[PARIS, EMPTY]),
    Recorded(f"<tool_call> {LIST}", calls=[PARIS, EMPTY]),
    Recorded(f"Sure.\n<tool_call>\n{json_call(PARIS)}\n</tool_call>", "Sure.", calls=[PARIS]),
    Recorded(f"<|tool_call|>[{json_call(NESTED)}]\nDone.", "Done.", calls=[NESTED]),
    broken('<|tool_call|>[{"name": "launch", "arguments": {}}]'),
    broken("<|tool_call|>[]"),
    broken("<|tool_call|> none"),
    Recorded(
        f'<|tool_call|>[{json_call(PARIS)}, {{"name": "launch"}}]', ', {"name": "launch"}]', calls=[PARIS]
    ),
]
PHI4 = [
    broken("Use functools.cache, or functools alone."),
    Recorded(f"functools{LIST}", calls=[PARIS, EMPTY]),
    Recorded(f"<|tool_call|>{LIST}<|/tool_call|>", calls=[PARIS, EMPTY]),
    Recorded(f"<|tool_call|>{json_call(PARIS)}<|/tool_call|>", calls=[PARIS]),
    Recorded(f"functools[{json_call(NESTED)}]<|/tool", calls=[NESTED]),
    broken('functools[{"name": "launch", "arguments": {}}]'),
    broken("functools[1, 2]"),
]
MISTRAL = [
    broken("Plain [TOOL] text."),
    Recorded(f"[TOOL_CALLS]{LIST}", calls=[PARIS, EMPTY]),
    Recorded(f"[TOOL_CALLS] {LIST}\n", calls=[PARIS, EMPTY]),
    Recorded(f"[TOOL_CALLS]get_weather[ARGS]{PARIS[1]}[TOOL_CALLS]now[ARGS]{{}}", calls=[PARIS, EMPTY]),
    Recorded(f"[TOOL_CALLS]get_weather{PARIS[1]}", calls=[PARIS]),
    Recorded(f"Hm.[TOOL_CALLS]get_weather[CALL_ID]123456789[ARGS]{NESTED[1]}", "Hm.", calls=[NESTED]),
    broken("[TOOL_CALLS]launch[ARGS]{}"),
    broken("[TOOL_CALLS]now"),
    broken("[TOOL_CALLS]now[ARGS]{'a': 1}"),
    broken("[TOOL_CALLS]now and then " + "x" * 600),
    broken("[TOOL_CALLS][1]"),
    Recorded(
        '[TOOL_CALLS]get_weather[ARGS]{"days": 1', calls=[("get_weather", '{"days": 1')], complete=False
    ),
]
BEGIN, CALL, SEP = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
CALL_END, END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"


def v3(call: tuple[str, str]) -> str:
    return f"{CALL}function{SEP}{call[0]}\n```json\n{call[1]}\n```{CALL_END}"


def v31(call: tuple[str, str]) -> str:
    return f"{CALL}{call[0]}{SEP}{call[1]}{CALL_END}"


DEEPSEEK = [
    broken(f"Plain text {BEGIN} here."),
    Recorded(f"{BEGIN}{v3(PARIS)}{END}", calls=[PARIS]),
    Recorded(f"I look.{BEGIN}{v3(NESTED)}\n{v3(EMPTY)}{END}", "I look.", calls=[NESTED, EMPTY]),
    Recorded(f"{BEGIN}{v31(PARIS)}{v31(EMPTY)}{END}", calls=[PARIS, EMPTY]),
    Recorded(f"{v3(PARIS)}", calls=[PARIS]),
    Recorded(f"{BEGIN}{v3(PARIS)[: -len(CALL_END)]}", calls=[PARIS]),
    broken(f"{BEGIN}{v3(('launch', '{}'))}{END}"),
    broken(f"{BEGIN}{CALL}function{SEP}now\n```json\n[1]\n```{CALL_END}{END}"),
    broken(f"{BEGIN}{CALL}now"),
]
TABLE = {
    "llama3_json": LLAMA3,
    "granite": GRANITE,
    "phi4": PHI4,
    "mistral": MISTRAL,
    "deepseek_v3": DEEPSEEK,
}


@pytest.mark.parametrize(
    ("name", "recorded"), [(name, recorded) for name, outputs in TABLE.items() for recorded in outputs]
)
def test_every_split(name: str, recorded: Recorded):
    check(ParserNames(tool=name), recorded)


def test_mistral_ids_are_nine_characters():
    parser = ParserSet(ParserNames(tool="mistral"), None).create(tools=TOOLS)
    output = parse_output(parser, f"[TOOL_CALLS]{LIST}")
    assert all(re.fullmatch("[A-Za-z0-9]{9}", call.id) for call in output.tool_calls)
    assert output.tool_calls[0].id != output.tool_calls[1].id


def test_arguments_are_streamed_while_they_are_written():
    parser = ParserSet(ParserNames(tool="llama3_json"), None).create(tools=TOOLS)
    text = '{"name": "run.code", "parameters": {"code": "' + "x" * 50
    num_deltas = sum(bool(parser.feed(char)) for char in text)
    assert num_deltas > 50
