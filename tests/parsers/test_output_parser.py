from __future__ import annotations

import importlib
import inspect
import random
import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_outputs import EMPTY, PARIS, TOOLS, check_split, json_call, said

from jaxserve.errors import ConfigError
from jaxserve.parsers import ContentDelta, OutputParser, ParserNames, ParserSet, choose, parse_output
from jaxserve.parsers.call_readers import JsonCall
from jaxserve.parsers.registry import (
    REASONING_ALIASES,
    REASONING_PARSERS,
    TOOL_ALIASES,
    TOOL_PARSERS,
    resolve,
)
from jaxserve.parsers.scan import JsonScanner, partial_tag
from jaxserve.parsers.tools.forced_json import ForcedArgumentsParser, ForcedCallsParser


def test_without_parsers_the_text_is_passed_on_as_it_is():
    parser = OutputParser()
    assert parser.feed(" a \n", [1]) == [ContentDelta(" a \n")]
    assert parser.feed("") == []
    assert parser.finish() == []


def test_only_the_first_call_is_kept_without_parallel_calls():
    text = f"<tool_call>{json_call(PARIS)}</tool_call><tool_call>{json_call(EMPTY)}</tool_call>"
    parser = ParserSet(ParserNames("hermes"), None).create(tools=TOOLS, parallel_tool_calls=False)
    assert said(parse_output(parser, text))[2] == [PARIS]
    assert parser.num_calls == 1


def test_calls_stay_in_the_content_without_tools():
    text = f"<tool_call>{json_call(PARIS)}</tool_call>"
    parser = ParserSet(ParserNames("hermes"), None).create()
    assert parse_output(parser, text).content == text


@pytest.mark.parametrize("tool", [*TOOL_PARSERS, *TOOL_ALIASES])
@pytest.mark.parametrize("reasoning", [None, "deepseek_r1", "gpt_oss"])
def test_no_text_breaks_a_parser_or_is_lost(tool: str, reasoning: str | None):
    """Fragments of all syntaxes, shuffled: nothing is raised, every split says the same."""
    parsers = ParserSet(ParserNames(tool, reasoning), None)
    tags = [tag for cls in parsers._classes(True) for tag in cls.special_tokens]
    tags += list(getattr(parsers.tool_class, "opening", ()))
    pieces = [*tags, '{"name": "now", "arguments": ', '{"a": ', "}", "[", "]", "(", ")", '"', "\\", "now", " ", "\n",
              "call:now{", "<function=now>", "<parameter=a>", "</parameter>", "</function>", "to=functions.now", ",",
              ";", "1", "x", "functools", "city='P'", "é"]  # fmt: skip
    rng = random.Random(f"{tool}{reasoning}")
    for _ in range(25):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 14)))
        whole = parse_output(parsers.create(tools=TOOLS), text)
        check_split(parsers.create(tools=TOOLS), list(text), whole)
        cut = rng.randrange(len(text) + 1)
        check_split(parsers.create(tools=TOOLS), [text[:cut], text[cut:]], whole)
        if not whole.tool_calls and reasoning is None and tool not in ("gpt_oss", "openai"):
            assert whole.content == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)
@given(
    st.dictionaries(st.text(max_size=4), JSON, max_size=3), st.booleans(), st.randoms(use_true_random=False)
)
def test_any_arguments_come_through(arguments: dict, ascii_only: bool, rng: random.Random):
    import json

    text = json.dumps(arguments, ensure_ascii=ascii_only)
    parts: list[str] = []
    started: list[str] = []
    call = JsonCall({"f"}, started.append, parts.append)
    source, position = f'{{"name": "f", "arguments": {text}}}', 0
    while position < len(source):
        end = position + rng.randrange(1, 9)
        assert call.feed(source[position:end]) == len(source[position:end])
        position = end
    assert call.done
    assert started == ["f"]
    assert "".join(parts) == text


@pytest.mark.parametrize("text", ["", "x", "{,}", "[1,]", '{"a"}', '{"a":}', "[1 2]", '"\\x"', "01", "1.", "+1", "nul",
                                  "NaN", "-", "[}", '{"a":1,}', "{1:2}", "[" * 200])  # fmt: skip
def test_what_is_not_json_is_not_scanned_as_json(text: str):
    scanner = JsonScanner()
    scanner.feed(text + " ")
    assert not scanner.done


def test_partial_tags():
    assert partial_tag("abc<to", ("<tool>", "</tool>")) == 3
    assert partial_tag("abc<", ("<tool>", "</tool>")) == 1
    assert partial_tag("<tool>", ("<tool>",)) == 0
    assert partial_tag("", ("<tool>",)) == 0


def test_forced_calls():
    text = f"[{json_call(PARIS, 'parameters')}, {json_call(EMPTY, 'parameters')}]"
    whole = parse_output(OutputParser(None, ForcedCallsParser(TOOLS)), text)
    assert said(whole) == ("", "", [PARIS, EMPTY])
    for at in range(len(text)):
        check_split(OutputParser(None, ForcedCallsParser(TOOLS)), [text[:at], text[at:]], whole)


def test_forced_arguments():
    tools = {"now": TOOLS["now"]}
    parser = OutputParser(None, ForcedArgumentsParser(tools))
    assert said(parse_output(parser, ' {"a": 1}\n'))[2] == [("now", '{"a": 1}\n')]
    assert said(parse_output(OutputParser(None, ForcedArgumentsParser(tools)), ""))[2] == []


# --- the registry ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("room", "place"),
    [("tools", place) for place in TOOL_PARSERS.values()]
    + [("reasoning", p) for p in REASONING_PARSERS.values()],
)
def test_every_parser_exists(room: str, place: str):
    module, _, name = place.partition(":")
    assert inspect.isclass(getattr(importlib.import_module(f"jaxserve.parsers.{room}.{module}"), name))


def test_aliases_name_parsers():
    assert set(TOOL_ALIASES.values()) <= set(TOOL_PARSERS)
    assert set(REASONING_ALIASES.values()) <= set(REASONING_PARSERS)


def test_flags_choose():
    def names(tool: str, reasoning: str) -> ParserNames:
        parsers = resolve(
            tool, reasoning, chat_template="<tool_call> <think>", tokenizer=None, model_type=None
        )
        return parsers.names

    assert names("auto", "auto") == ParserNames("hermes", "deepseek_r1")
    assert names("none", "none") == ParserNames()
    assert names("openai", "qwen3") == ParserNames("gpt_oss", "qwen3")
    with pytest.raises(ConfigError, match=r"tool_call_parser is 'nope'.*hermes") as error:
        names("nope", "auto")
    assert error.value.param == "tool_call_parser"
    with pytest.raises(ConfigError, match="reasoning_parser"):
        names("auto", "nope")


@pytest.mark.parametrize(
    ("template", "model_type", "tool", "reasoning"),
    [
        ("{{ tools }} <tool_call> <think> enable_thinking", "qwen3", "hermes", "qwen3"),
        ("{{ tools }} <tool_call>\\n<function=", "qwen3_moe", "qwen3_coder", None),
        ("<｜tool▁calls▁begin｜> </think>", "deepseek_v3", "deepseek_v3", "deepseek_r1"),
        ("<|python_tag|>", "llama", "llama3_json", None),
        ('{"name": x, "parameters": y}', "llama", "llama3_json", None),
        ("<|python_start|>", "llama4", "llama4_pythonic", None),
        ("[TOOL_CALLS] [THINK]", "mistral", "mistral", "mistral"),
        ("<|tool_call|> Here is my thought process", "granite", "granite", "granite"),
        ("<|tool|> <|tool_call|>", "phi3", "phi4", None),
        ("<start_function_call>", "gemma3_text", "gemma", None),
        ("<|channel|>", "gpt_oss", "gpt_oss", "gpt_oss"),
        ("{{ messages }}", "llama", None, None),
        (None, None, None, None),
    ],
)
def test_the_model_chooses(
    template: str | None, model_type: str | None, tool: str | None, reasoning: str | None
):
    assert choose(template, None, model_type) == ParserNames(tool, reasoning)


def test_ids_look_like_openais():
    parser = ParserSet(ParserNames("hermes"), None).create(tools=TOOLS)
    call = parse_output(parser, f"<tool_call>{json_call(PARIS)}").tool_calls[0]
    assert call.id.startswith("call_")
    assert set(call.id[5:]) <= set(string.hexdigits)


def test_unknown_text_is_no_token():
    """A tokenizer that writes "unknown" for a tag does not have it."""

    class Words:
        special_token_ids = frozenset({0})

        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            return [0]

        def convert_ids_to_tokens(self, token_ids: list[int]) -> list[str]:
            return ["[UNK]"] * len(token_ids)

    assert choose("{{ messages }}", Words(), None) == ParserNames()
    parsers = ParserSet(ParserNames("mistral", "mistral"), Words())
    assert parsers.shown_special_tokens(tools=True) == []
    assert parsers.reasoning_params("") is None
