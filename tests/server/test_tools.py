"""Tools and reasoning of chat completions, over a fake engine that says what a model would say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import openai
import pytest
from fake_engine import CHAT_TEMPLATE, FakeEngine, FakeTokenizer
from http_support import chunks, client_of, error
from live_server import live_server

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError
from jaxserve.reasoning_params import ReasoningParams
from jaxserve.sampling_params import SamplingParams
from jaxserve.server.app import create_app
from jaxserve.server.openai.tools import calls_schema, check_tools

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": SCHEMA}}
NOW = {"type": "function", "function": {"name": "now"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}{% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
THINKING = TEMPLATE + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


async def ask(output: str, *, template: str = TEMPLATE, **body: Any) -> tuple[FakeEngine, Any]:
    """The answer of a model that says ``output``."""
    engine = FakeEngine(output=output, once=True)
    config = ServerConfig(**body.pop("config", {}))
    async with client_of(create_app(engine, config, ["m"], chat_template=template)) as client:
        return engine, await client.post("/v1/chat/completions", json={"messages": HELLO, **body})


async def answer(output: str, **body: Any) -> tuple[FakeEngine, dict[str, Any]]:
    engine, response = await ask(output, **body)
    assert response.status_code == 200, response.text
    return engine, response.json()["choices"][0]


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's deltas add up to, ids and names being sent once."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for event in events:
        for choice in event["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning"] += delta.get("reasoning") or ""
            for call in delta.get("tool_calls") or []:
                if "id" in call:
                    assert call["index"] == len(message["tool_calls"])
                    message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                else:
                    assert "name" not in call["function"]
                message["tool_calls"][call["index"]]["arguments"] += call["function"].get("arguments", "")
    return message


# --- answers -----------------------------------------------------------------------------------------------


async def test_a_call():
    engine, choice = await answer(f"Let me look.\n{CALL}", tools=[TOOL])
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me look."
    [call] = message["tool_calls"]
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Paris"}
    assert engine.admitted[0].prompt == "[get_weather]<user>hello;<assistant>"


async def test_content_is_null_beside_calls_alone():
    assert (await answer(CALL, tools=[TOOL]))[1]["message"]["content"] is None


async def test_a_streamed_call():
    _, response = await ask(f"Let me look.\n{CALL}\n{CALL}", tools=[TOOL], stream=True)
    events = chunks(response)
    call = {"name": "get_weather", "arguments": '{"city": "Paris"}'}
    assert added_up(events) == {"content": "Let me look.", "reasoning": "", "tool_calls": [call, call]}
    assert [e["choices"][0]["finish_reason"] for e in events][-1] == "tool_calls"
    parts = [c for e in events for c in e["choices"][0]["delta"].get("tool_calls", [])]
    assert len(parts) > 20, "arguments come while they are written"


async def test_an_answer_without_calls():
    _, choice = await answer("No call.", tools=[TOOL])
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == "No call."
    assert "tool_calls" not in choice["message"]


async def test_a_cut_call_ends_by_length():
    _, choice = await answer(CALL, tools=[TOOL], max_tokens=59)
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'


async def test_tool_choice_none_leaves_calls_in_the_text():
    engine, choice = await answer(CALL, tools=[TOOL], tool_choice="none")
    assert choice["message"]["content"] == CALL
    assert choice["finish_reason"] == "stop"
    assert engine.admitted[0].prompt.startswith("[get_weather]"), "the model still knows them"


async def test_only_one_call_without_parallel_calls():
    _, choice = await answer(CALL + CALL, tools=[TOOL], parallel_tool_calls=False)
    assert len(choice["message"]["tool_calls"]) == 1


async def test_every_choice_has_a_parser_of_its_own():
    text = CALL * 2
    _, response = await ask(text, tools=[TOOL], n=2, max_tokens=len(CALL) + 4)
    first, second = response.json()["choices"]
    assert len(first["message"]["tool_calls"]) == 1
    assert "tool_calls" not in second["message"], "it began in the middle of the tag"


async def test_conversations_with_calls_and_results():
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": [
            {"id": "call_1", "type": "function", "index": 0,
             "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "sunny"}]},
    ]  # fmt: skip
    engine, _ = await answer("Sunny.", tools=[TOOL], messages=messages)
    assert engine.admitted[0].prompt == (
        '[get_weather]<user>hello;<assistant><tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}};'
        "<tool>sunny;<assistant>"
    )


# --- required and named ------------------------------------------------------------------------------------


async def test_required_calls_are_forced_by_a_grammar():
    text = '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "now", "parameters": {}}]'
    engine, choice = await answer(text, tools=[TOOL, NOW], tool_choice="required")
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in choice["message"]["tool_calls"]]
    assert calls == [("get_weather", '{"city": "Paris"}'), ("now", "{}")]
    assert choice["finish_reason"] == "tool_calls"
    schema = json.loads(engine.admitted[0].params.structured_outputs.json)
    assert [option["properties"]["name"] for option in schema["items"]["anyOf"]] == [
        {"const": "get_weather"},
        {"const": "now"},
    ]
    assert schema["items"]["anyOf"][0]["properties"]["parameters"] == SCHEMA


async def test_a_named_call_is_its_arguments():
    choice_field = {"type": "function", "function": {"name": "get_weather"}}
    for stream in (False, True):
        engine, response = await ask(
            '{"city": "Paris"}', tools=[TOOL, NOW], tool_choice=choice_field, stream=stream
        )
        if stream:
            calls = added_up(chunks(response))["tool_calls"]
        else:
            calls = [c["function"] for c in response.json()["choices"][0]["message"]["tool_calls"]]
        assert calls == [{"name": "get_weather", "arguments": '{"city": "Paris"}'}]
        assert json.loads(engine.admitted[0].params.structured_outputs.json) == SCHEMA


async def test_allowed_tools():
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    _, choice = await answer(
        CALL, tools=[TOOL, NOW], tool_choice={"type": "allowed_tools", "allowed_tools": allowed}
    )
    assert choice["message"]["content"] == CALL, "a call of another tool is text"


def test_definitions_move_to_the_root_of_the_grammar():
    tool = {"properties": {"a": {"$ref": "#/definitions/A"}}, "definitions": {"A": {"type": "integer"}}}
    schema = calls_schema({"f": tool}, parallel=False)
    assert schema["$defs"] == {"A": {"type": "integer"}}
    assert schema["items"]["properties"]["parameters"] == {"properties": {"a": {"$ref": "#/$defs/A"}}}
    assert schema["maxItems"] == 1


async def test_a_grammar_beside_a_required_call_is_refused():
    _, response = await ask("x", tools=[TOOL], tool_choice="required", structured_outputs={"regex": "a+"})
    error(response, 400, "tool_choice")


# --- templates without tools -------------------------------------------------------------------------------


async def test_tools_are_described_where_the_template_takes_none():
    messages = [
        {"role": "system", "content": "Be brief."},
        *HELLO,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "1", "function": {"name": "now", "arguments": ""}}],
        },
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        {"role": "tool", "tool_call_id": "2", "content": "midnight"},
    ]
    engine, choice = await answer(CALL, template=CHAT_TEMPLATE, tools=[TOOL], messages=messages)
    prompt = engine.admitted[0].prompt
    assert prompt.startswith("<system>Be brief.\n\nYou may call functions")
    assert json.dumps(TOOL) in prompt
    assert '<assistant><tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>' in prompt
    assert "<user><tool_response>\nnoon\n</tool_response>\n<tool_response>\nmidnight" in prompt
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


async def test_another_parser_needs_a_template_that_takes_tools():
    config = {"tool_call_parser": "mistral"}
    _, response = await ask(CALL, template=CHAT_TEMPLATE, tools=[TOOL], config=config)
    assert "chat template" in error(response, 400, "tools")["message"]


# --- flags -------------------------------------------------------------------------------------------------


async def test_the_parser_can_be_named():
    text = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]'
    _, choice = await answer(text, tools=[TOOL], config={"tool_call_parser": "mistral"})
    assert len(choice["message"]["tool_calls"][0]["id"]) == 9


@pytest.mark.parametrize("flag", ["tool_call_parser", "reasoning_parser"])
def test_unknown_parsers_are_refused(flag: str):
    with pytest.raises(ConfigError, match=flag):
        create_app(FakeEngine(), ServerConfig(**{flag: "nope"}), ["m"])


@pytest.mark.parametrize(
    ("config", "param"),
    [({"tool_call_parser": "none"}, "tools"), ({"enable_auto_tool_choice": False}, "tool_choice")],
)
async def test_auto_calls_can_be_switched_off(config: Mapping[str, Any], param: str):
    _, response = await ask(CALL, tools=[TOOL], config=config)
    error(response, 400, param)
    _, response = await ask('{"city": "x"}', tools=[TOOL], config=config, tool_choice="required")
    assert response.status_code == 200


# --- reasoning ---------------------------------------------------------------------------------------------


THOUGHT = "<think>\nHm.\n</think>\n\nParis."


async def test_reasoning_is_separate():
    for stream in (False, True):
        _, response = await ask(THOUGHT, template=THINKING, stream=stream)
        if stream:
            message = added_up(chunks(response))
        else:
            message = response.json()["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Hm.", "Paris.")


async def test_reasoning_can_be_left_out():
    _, choice = await answer(THOUGHT, template=THINKING, include_reasoning=False)
    assert "reasoning" not in choice["message"]
    assert choice["message"]["content"] == "Paris."


async def test_the_reasoning_parser_can_be_switched_off():
    _, choice = await answer(THOUGHT, template=THINKING, config={"reasoning_parser": "none"})
    assert choice["message"]["content"] == THOUGHT


async def test_reasoning_effort_reaches_the_template():
    engine, choice = await answer("Paris.", template=THINKING, reasoning_effort="none")
    assert engine.admitted[0].prompt.endswith("<assistant><think></think>")
    assert choice["message"]["content"] == "Paris."
    engine, _ = await answer(THOUGHT, template=THINKING, reasoning_effort="high")
    assert engine.admitted[0].prompt.endswith("<assistant>")
    engine, _ = await answer("x", template=TEMPLATE + "{{ reasoning_effort }}", reasoning_effort="high")
    assert engine.admitted[0].prompt.endswith("<assistant>high")


async def test_reasoning_effort_that_would_be_ignored_is_refused():
    _, response = await ask("x", reasoning_effort="high")
    error(response, 400, "reasoning_effort")


# --- mistakes ----------------------------------------------------------------------------------------------


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": []}, "tools"),
        ({"tools": "f"}, "tools"),
        ({"tools": ["f"]}, "tools[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name"),
        ({"tools": [tool(name="x" * 65)]}, "tools[0].function.name"),
        ({"tools": [tool(name=5)]}, "tools[0].function.name"),
        ({"tools": [tool(descriptoin="x")]}, "tools[0].function.descriptoin"),
        ({"tools": [tool(description=5)]}, "tools[0].function.description"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
        ({"tools": [tool(parameters={"properties": 5})]}, "tools[0].function.parameters.properties"),
        ({"tools": [tool(parameters={"properties": {"a": 5}})]}, "tools[0].function.parameters.properties.a"),
        ({"tools": [tool(parameters={"required": "a"})]}, "tools[0].function.parameters.required"),
        (
            {"tools": [tool(parameters={"properties": {"a": {"type": "strin"}}})]},
            "tools[0].function.parameters.properties.a.type",
        ),
        (
            {"tools": [tool(parameters={"properties": {"a": {"items": 5}}})]},
            "tools[0].function.parameters.properties.a.items",
        ),
        (
            {"tools": [tool(parameters={"anyOf": [{"enum": "a"}]})]},
            "tools[0].function.parameters.anyOf[0].enum",
        ),
        ({"tools": [tool(parameters={"$defs": {"A": []}})]}, "tools[0].function.parameters.$defs.A"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": "maybe"}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": 5}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        (
            {"tools": [tool()], "tool_choice": {"type": "function", "function": {}}},
            "tool_choice.function.name",
        ),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tools": [tool()], "tool_choice": {"type": "custom"}}, "tool_choice.type"),
        ({"tools": [tool()], "parallel_tool_calls": "no"}, "body.parallel_tool_calls"),
        ({"reasoning_effort": "extreme"}, "body.reasoning_effort"),
    ],
)
async def test_mistakes(body: dict[str, Any], param: str):
    _, response = await ask("x", **body)
    error(response, 400, param)


@pytest.mark.parametrize(
    ("call", "path"),
    [
        ({"function": {"name": "f", "arguments": "{"}}, "function.arguments"),
        ({"function": {"name": "f", "arguments": "[]"}}, "function.arguments"),
        ({"function": {"name": "f", "arguments": 5}}, "function.arguments"),
        ({"function": {"name": ""}}, "function.name"),
        ({"id": 5, "function": {"name": "f"}}, "id"),
        ({"type": "custom", "function": {"name": "f"}}, "type"),
    ],
)
async def test_mistakes_in_earlier_calls(call: dict[str, Any], path: str):
    _, response = await ask("x", messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}])
    error(response, 400, f"messages[1].tool_calls[0].{path}")


# --- the official client -----------------------------------------------------------------------------------


async def test_openai_client():
    engine = FakeEngine(output=f"<think>Hm.</think>Let me look.\n{CALL}", once=True)
    app = create_app(engine, ServerConfig(), ["m"], chat_template=THINKING)
    async with live_server(app) as url:  # noqa: SIM117
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0) as client:
            whole = await client.chat.completions.create(model="m", messages=HELLO, tools=[TOOL])
            message = whole.choices[0].message
            assert message.tool_calls[0].function.name == "get_weather"
            assert message.model_extra["reasoning"] == "Hm."
            async with client.chat.completions.stream(model="m", messages=HELLO, tools=[TOOL]) as stream:
                done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
                final = await stream.get_final_completion()
            assert done[0].name == "get_weather"
            assert json.loads(done[0].arguments) == {"city": "Paris"}
            assert final.choices[0].message.content == "Let me look."
            assert final.choices[0].finish_reason == "tool_calls"
            # What came back can be sent again.
            again = [
                *HELLO,
                message.model_dump(),
                {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"},
            ]
            await client.chat.completions.create(model="m", messages=again, tools=[TOOL])
            assert "sunny" in engine.admitted[-1].prompt


async def test_tokenize_counts_tools():
    engine = FakeEngine()
    async with client_of(create_app(engine, ServerConfig(), ["m"], chat_template=TEMPLATE)) as client:
        counts = []
        for tools in (None, [TOOL]):
            response = await client.post("/tokenize", json={"messages": HELLO, "tools": tools})
            counts.append(response.json()["count"])
        assert counts[1] == counts[0] + len("[get_weather]")
        error(await client.post("/tokenize", json={"prompt": "x", "tools": [TOOL]}), 400, "tools")
        error(await client.post("/tokenize", json={"messages": HELLO, "tools": []}), 400, "tools")


async def test_a_budget_needs_a_token_that_ends_the_reasoning():
    _, response = await ask(THOUGHT, template=THINKING, thinking_token_budget=5)
    error(response, 400, "thinking_token_budget")
    _, response = await ask(THOUGHT, template=THINKING, thinking_token_budget=-2)
    error(response, 400, "thinking_token_budget")
    _, response = await ask(THOUGHT, template=THINKING, thinking_token_budget=-1)
    assert response.status_code == 200


class ThinkTokens(FakeTokenizer):
    """``<think>`` and ``</think>`` as single tokens."""

    def convert_ids_to_tokens(self, token_ids: Sequence[int]) -> list[str]:
        return [{1: "<think>", 2: "</think>"}.get(i) or chr(i) for i in token_ids]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        special = {"<think>": 1, "</think>": 2}
        return (
            [special[text]]
            if text in special
            else super().encode(text, add_special_tokens=add_special_tokens)
        )


async def plan_of(body: dict[str, Any]) -> tuple[SamplingParams, dict[str, Any]]:
    engine = FakeEngine(output="<think>Hm.</think>" + '{"city": "Paris"}', once=True)
    engine.tokenizer = ThinkTokens()
    async with client_of(create_app(engine, ServerConfig(), ["m"], chat_template=THINKING)) as client:
        response = await client.post("/v1/chat/completions", json={"messages": HELLO, **body})
    assert response.status_code == 200, response.text
    return engine.admitted[0].params, response.json()["choices"][0]["message"]


async def test_reasoning_is_left_out_of_grammars():
    named = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "get_weather"}}}
    for body in (named, {"response_format": {"type": "json_object"}}):
        params, message = await plan_of(body)
        assert params.reasoning == ReasoningParams(start_token_id=1, end_token_ids=[2])
        assert message["reasoning"] == "Hm."
    params, message = await plan_of({**named, "reasoning_effort": "none"})
    assert params.reasoning is None, "the prompt has ended it"
    assert message["tool_calls"][0]["function"]["arguments"].startswith("<think>"), (
        "no grammar would allow this"
    )


async def test_a_budget_reaches_the_engine():
    params, _ = await plan_of({"thinking_token_budget": 5})
    assert params.reasoning == ReasoningParams(start_token_id=1, end_token_ids=[2], budget=5)
    params, _ = await plan_of({})
    assert params.reasoning is None


def test_a_tool_without_parameters_takes_none():
    assert check_tools([NOW])[0]["function"]["parameters"]["additionalProperties"] is False


STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}


async def test_strict_tools_constrain_calls_alone():
    engine, choice = await answer(CALL, tools=[STRICT, NOW])
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"
    form = json.loads(engine.admitted[0].params.structured_outputs.structural_tag)["format"]
    assert form["triggers"] == ["<tool_call>"]
    assert [tag["content"]["json_schema"] for tag in form["tags"]] == [SCHEMA, {"type": "object"}]
    engine, _ = await answer(CALL, tools=[STRICT], parallel_tool_calls=False)
    assert json.loads(engine.admitted[0].params.structured_outputs.structural_tag)["format"][
        "stop_after_first"
    ]


async def test_without_strict_tools_nothing_is_constrained():
    engine, _ = await answer(CALL, tools=[TOOL])
    assert engine.admitted[0].params.structured_outputs is None
    engine, _ = await answer(CALL, tools=[STRICT], tool_choice="none")
    assert engine.admitted[0].params.structured_outputs is None


async def test_a_grammar_of_the_request_wins_over_strict_tools():
    engine, _ = await answer("x", tools=[STRICT], structured_outputs={"regex": "x"})
    assert engine.admitted[0].params.structured_outputs.regex == "x"


def test_schemas_of_every_form_are_taken():
    schema = {
        "properties": {
            "a": {"type": ["string", "null"], "enum": ["x", None]},
            "b": {"items": [{"type": "integer"}], "prefixItems": [True]},
            "c": {"$ref": "#/$defs/C"},
            "d": {"anyOf": [{"const": 1}, {"not": {}}], "default": {"type": "anything"}},
        },
        "$defs": {"C": {"type": "object", "additionalProperties": {"type": "number"}}},
        "required": ["a"],
    }
    (checked,) = check_tools([tool(parameters=schema)])
    assert checked["function"]["parameters"] == {"type": "object", **schema}
    assert check_tools([tool(parameters={})])[0]["function"]["parameters"] == {"type": "object"}


@pytest.mark.parametrize(
    ("begun", "output", "reasoning", "content"),
    [
        ("Sure", ", Paris.", "", ", Paris."),
        ("<think>Hm", "m.</think>Paris.", "m.", "Paris."),
        ("<think>Hm.</think>Par", "is.", "", "is."),
    ],
)
@pytest.mark.parametrize("parser", ["deepseek_r1", "qwen3"])
async def test_a_continued_message_says_where_the_reasoning_is(
    parser: str, begun: str, output: str, reasoning: str, content: str
):
    _, choice = await answer(
        output,
        messages=[*HELLO, {"role": "assistant", "content": begun}],
        continue_final_message=True,
        config={"reasoning_parser": parser},
    )
    assert choice["message"].get("reasoning", "") == reasoning
    assert choice["message"]["content"] == content
