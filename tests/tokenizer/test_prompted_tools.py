from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.tokenizer.prompted_tools import in_messages, takes_tools

TOOL = {"type": "function", "function": {"name": "f", "description": "é"}}
USER = {"role": "user", "content": "hi"}


def call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


def test_which_templates_take_tools():
    assert takes_tools("{% if tools %}{{ tools }}{% endif %}")
    assert takes_tools("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}")
    assert not takes_tools("{% for message in messages %}{{ message.tools }}{% endfor %}")


def test_tools_go_into_the_system_message():
    described = in_messages([USER], [TOOL])
    assert [message["role"] for message in described] == ["system", "user"]
    assert '{"type": "function", "function": {"name": "f", "description": "é"}}' in described[0]["content"]
    system = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    described = in_messages([system, USER], [TOOL])
    assert described[0]["content"].startswith("Be brief.\n\nYou may call")
    assert system["content"] == [{"type": "text", "text": "Be brief."}], "the caller's stay as they are"


def test_calls_and_results_become_text():
    conversation = [
        USER,
        call(name="f", arguments='{"a": 1}'),
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
        USER,
        call(name="f", arguments={"a": 1}),
        call(name="f"),
    ]
    texts = [message["content"] for message in in_messages(conversation, None)]
    assert texts == [
        "hi",
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>",
        "hi",
        '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
    ]


def test_without_calls_and_tools_nothing_changes():
    assert in_messages([USER], None) == [USER]


@pytest.mark.parametrize(
    "message", [call(name="f", arguments="{"), call(), {"role": "assistant", "tool_calls": [5]}]
)
def test_other_forms_are_refused(message: dict[str, Any]):
    with pytest.raises(InvalidRequestError) as error:
        in_messages([USER, message], None)
    assert error.value.param == "messages"
