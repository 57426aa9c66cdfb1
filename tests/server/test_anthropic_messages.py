"""POST /v1/messages and /v1/messages/count_tokens: content blocks, tools, thinking, streams, errors."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from http_support import client_of
from pydantic import ValidationError
from scripted_engine import ScriptedEngine
from test_request_fields import EXPECTED, GIVEN

from jaxserve.config import ServerConfig
from jaxserve.server.anthropic.content import parse_messages
from jaxserve.server.anthropic.requests import NOT_HERE, UNSUPPORTED, MessageRequest
from jaxserve.server.app import create_app

pytestmark = pytest.mark.anyio

THINKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
    "{% if enable_thinking %}<think>{% endif %}{# </think> #}"
)
TOOL = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture
def ask(client: httpx.AsyncClient):
    async def post(**body: Any) -> httpx.Response:
        return await client.post("/v1/messages", json={"messages": HELLO, "max_tokens": 4, **body})

    return post


async def ask_scripted(engine: FakeEngine, body: dict[str, Any], **options: Any) -> httpx.Response:
    async with client_of(create_app(engine, ServerConfig(), ["m"], **options)) as client:
        return await client.post("/v1/messages", json={"messages": HELLO, "max_tokens": 500, **body})


def refused(
    response: httpx.Response, status: int, kind: str = "invalid_request_error", message: str = ""
) -> None:
    """An error in Anthropic's form."""
    assert response.status_code == status, response.text
    body = response.json()
    assert body["type"] == "error"
    assert set(body) == {"type", "error", "request_id"}
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert message in body["error"]["message"]
    assert body["request_id"] == response.headers["request-id"]


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found: list[dict[str, Any]] = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def assembled(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream adds up to; its events must be nested as Anthropic says."""
    assert [event["type"] for event in found[:2]] == ["message_start", "ping"]
    message = found[0]["message"]
    assert message["content"] == []
    assert message["stop_reason"] is None
    parts: list[str] | None = None
    for event in found[2:-2]:
        match event["type"]:
            case "content_block_start":
                assert parts is None
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                parts = []
            case "content_block_delta":
                assert parts is not None
                assert event["index"] == len(message["content"]) - 1
                delta = event["delta"]
                kind = delta.pop("type")
                (text,) = delta.values()
                assert kind == "signature_delta" or text or event["index"] == 0
                parts.append(text)
            case "content_block_stop":
                assert parts is not None
                block, whole = message["content"][-1], "".join(parts)
                parts = None
                if block["type"] == "tool_use":
                    assert block["input"] == {}
                    block["input"] = json.loads(whole)
                else:
                    assert block[block["type"]] == ""
                    block[block["type"]] = whole
            case other:
                raise AssertionError(other)
    assert parts is None
    assert [event["type"] for event in found[-2:]] == ["message_delta", "message_stop"]
    message.update(found[-2]["delta"], usage=found[-2]["usage"])
    return message


def body_of(response: httpx.Response, stream: bool) -> dict[str, Any]:
    return assembled(events(response)) if stream else response.json()


# --- answers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_text(ask, engine: FakeEngine, stream):
    body = body_of(await ask(system="Be short.", stream=stream), stream)
    assert engine.admitted[0].prompt == "<system>Be short.\n<user>hello\n<assistant>"
    assert body["id"].startswith("msg_")
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", "fake-model")
    assert body["content"] == [{"type": "text", "text": "abcd"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("max_tokens", None)
    prompt = len(engine.admitted[0].prompt_token_ids)
    assert body["usage"]["cache_read_input_tokens"] == prompt // 16 * 16
    assert body["usage"]["input_tokens"] + body["usage"]["cache_read_input_tokens"] == prompt
    assert body["usage"]["output_tokens"] == 4


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequences(ask, stream):
    body = body_of(await ask(stop_sequences=["c", "z"], stream=stream), stream)
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", "c")


async def test_the_turn_ends():
    body = (await ask_scripted(ScriptedEngine({"": "Hi!"}), {})).json()
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["content"] == [{"type": "text", "text": "Hi!"}]


async def test_blocks_of_text(ask, engine: FakeEngine):
    hint = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    await ask(
        system=[{"type": "text", "text": "A"}, {"type": "text", "text": "B", **hint}],
        messages=[{"role": "user", "content": [{"type": "text", "text": "C", **hint, "citations": None}]}],
    )
    assert engine.admitted[0].prompt == "<system>A\nB\n<user>C\n<assistant>"


async def test_the_answer_goes_on_from_the_assistants_last_words(ask, engine: FakeEngine):
    await ask(messages=[*HELLO, {"role": "assistant", "content": "The"}])
    assert engine.admitted[0].prompt == "<user>hello\n<assistant>The"


async def test_parameters_reach_the_engine(ask, engine: FakeEngine):
    await ask(temperature=0.5, top_p=0.5, top_k=7, min_p=0.1, seed=3, cache_salt="s", priority=2)
    admitted = engine.admitted[0]
    params = admitted.params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.5, 7, 3)
    assert (params.min_p, params.max_tokens) == (0.1, 4)
    assert (admitted.cache_salt, admitted.priority) == ("s", 2)


async def test_a_json_schema(ask, engine: FakeEngine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    await ask(output_config={"format": {"type": "json_schema", "schema": schema}})
    assert json.loads(engine.admitted[0].params.structured_outputs.json) == schema


async def test_every_sampling_parameter_reaches_the_engine(ask, engine: FakeEngine):
    given = {name: value for name, value in GIVEN.items() if name not in NOT_HERE}
    assert (await ask(**given)).status_code == 200
    params = engine.admitted[0].params
    for name in given:
        expected = EXPECTED[name]
        found = getattr(params, name)
        assert found == expected or set(expected) <= set(found), name


@pytest.mark.parametrize("name", sorted(UNSUPPORTED.keys() - MessageRequest.model_fields.keys()))
def test_what_is_not_offered_is_refused_by_name(name):
    with pytest.raises(ValidationError, match=name):
        MessageRequest.model_validate({"messages": HELLO, "max_tokens": 1, name: {"some": "thing"}})


# --- tools ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_calls(stream):
    engine = ScriptedEngine({"": f"Let me see.\n{CALL}\n{CALL.replace('Paris', 'Rome')}"})
    body = body_of(await ask_scripted(engine, {"tools": [TOOL], "stream": stream}), stream)
    assert '"city": {"type": "string"}' in engine.admitted[0].prompt
    text, first, second = body["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert (first["type"], first["name"], first["input"]) == ("tool_use", "weather", {"city": "Paris"})
    assert second["input"] == {"city": "Rome"}
    assert first["id"] != second["id"]
    assert body["stop_reason"] == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "choice,answer",
    [
        ({"type": "any"}, '[{"name": "weather", "parameters": {"city": "Oslo"}}]'),
        ({"type": "tool", "name": "weather"}, '{"city": "Oslo"}'),
    ],
)
async def test_a_call_that_is_required(choice, answer, stream):
    engine = ScriptedEngine({"": answer})
    body = body_of(
        await ask_scripted(engine, {"tools": [TOOL], "tool_choice": choice, "stream": stream}), stream
    )
    assert engine.admitted[0].params.structured_outputs is not None
    assert [block["input"] for block in body["content"]] == [{"city": "Oslo"}]
    assert body["stop_reason"] == "tool_use"


async def test_one_call_at_most():
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    engine = ScriptedEngine({"": CALL + CALL})
    body = (await ask_scripted(engine, {"tools": [TOOL], "tool_choice": choice})).json()
    assert [block["type"] for block in body["content"]] == ["tool_use"]


async def test_no_calls():
    engine = ScriptedEngine({"": CALL})
    body = (await ask_scripted(engine, {"tools": [TOOL], "tool_choice": {"type": "none"}})).json()
    assert body["content"] == [{"type": "text", "text": CALL}]
    assert body["stop_reason"] == "end_turn"


async def test_a_call_that_was_cut_off():
    engine = ScriptedEngine({"": CALL})
    body = (await ask_scripted(engine, {"tools": [TOOL], "max_tokens": 55})).json()
    assert body["stop_reason"] == "max_tokens"
    assert body["content"][0]["input"] == {}


async def test_results_come_back(ask, engine: FakeEngine):
    await ask(
        tools=[TOOL],
        messages=[
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "text", "text": "Let me see."},
                    {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Paris"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "t1",
                        "content": [{"type": "text", "text": "Rain"}],
                    },
                    {"type": "tool_result", "tool_use_id": "t1", "content": "no such city", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "t1"},
                    {"type": "text", "text": "And?"},
                ],
            },
        ],
    )
    prompt = engine.admitted[0].prompt
    assert '{"name": "weather", "arguments": {"city": "Paris"}}' in prompt
    assert "<tool_response>\nRain\n</tool_response>" in prompt
    assert "Error: no such city" in prompt
    assert prompt.endswith("And?\n<assistant>")


def test_messages_in_chats_form():
    (message,) = parse_messages(
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hmm", "signature": ""},
                    {"type": "tool_use", "id": "t", "name": "f", "input": {}},
                ],
            }
        ]
    )
    assert message == {
        "role": "assistant",
        "content": "",
        "reasoning": "Hmm",
        "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }


# --- thinking ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_thinking(stream):
    engine = ScriptedEngine({"<think>": "Hmm, hello.</think>\n\nHi!", "": "Hi!"})
    options = {"chat_template": THINKS}
    asked = {"thinking": {"type": "adaptive"}, "chat_template_kwargs": {"enable_thinking": True}}
    body = body_of(await ask_scripted(engine, {**asked, "stream": stream}, **options), stream)
    thought, text = body["content"]
    assert (thought["type"], thought["thinking"]) == ("thinking", "Hmm, hello.")
    assert text["text"] == "Hi!"
    asked["thinking"]["display"] = "omitted"
    body = body_of(await ask_scripted(engine, {**asked, "stream": stream}, **options), stream)
    assert [block["type"] for block in body["content"]] == ["text"]
    body = body_of(
        await ask_scripted(engine, {"thinking": {"type": "disabled"}, "stream": stream}, **options), stream
    )
    assert [block["type"] for block in body["content"]] == ["text"]
    assert engine.admitted[-1].prompt.endswith("<assistant>")


async def test_a_budget_needs_a_token_that_ends_the_thinking():
    asked = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000}
    response = await ask_scripted(ScriptedEngine({"": "x"}), asked, chat_template=THINKS)
    refused(response, 400, message="thinking.budget_tokens is not supported with this model")


async def test_a_model_that_does_not_think(ask):
    refused(await ask(thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2000), 400)
    assert (await ask(thinking={"type": "disabled"})).status_code == 200
    assert (await ask(thinking={"type": "adaptive"})).status_code == 200


# --- counting ---------------------------------------------------------------------------------------------


async def test_counting(client, ask, engine: FakeEngine):
    body = {"messages": HELLO, "system": "Be short.", "tools": [TOOL], "model": "fake-model"}
    counted = (await client.post("/v1/messages/count_tokens", json=body)).json()
    await ask(**body)
    assert counted == {"input_tokens": len(engine.admitted[0].prompt_token_ids)}
    refused(await client.post("/v1/messages/count_tokens", json={"messages": []}), 400)
    refused(await client.post("/v1/messages/count_tokens", json={"messages": HELLO, "max_tokens": 5}), 400)


# --- mistakes ---------------------------------------------------------------------------------------------


def user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    "body,message",
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "4"}, "max_tokens"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (user({"type": "image", "source": {}}), "messages[0].content[0].type"),
        (user({"type": "text"}), "messages[0].content[0].text"),
        (user({"type": "text", "text": "x", "more": 1}), "messages[0].content[0].more"),
        (user({"type": "tool_use", "id": "t", "name": "f", "input": {}}), "messages[0].content[0].type"),
        (user("x"), "messages[0].content[0]"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
         "messages[0].content[0].type"),
        ({"system": 5}, "system"),
        ({"system": [{"type": "image"}]}, "system[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools[0].input_schema.type"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 2000}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"effort": "high"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"temperature": 9}, "temperature"),
        ({"stop_sequences": [""]}, "stop"),
        ({"stop": "x"}, "stop"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"container": "c"}, "container"),
        ({"n": 2}, "n"),
        ({"nonsense": 1}, "nonsense"),
        ({"max_tokens": 100_000}, "max_tokens"),
    ],
)  # fmt: skip
async def test_mistakes_are_named(ask, engine: FakeEngine, body, message):
    refused(await ask(**body), 400, message=message)
    assert engine.admitted == []


async def test_errors_of_every_kind_take_anthropics_form(client, ask, engine: FakeEngine):
    refused(await ask(model="other"), 404, "not_found_error")
    refused(await client.post("/v1/messages", content=b"{"), 400)
    refused(
        await client.post("/v1/messages", content=b"{", headers={"content-type": "application/json"}), 400
    )
    refused(await client.get("/v1/messages"), 405)
    refused(await client.get("/v1/messages/nowhere"), 404, "not_found_error")
    refused(await ask(messages=[{"role": "user", "content": "x" * 5000}]), 400)
    refused(await ask(messages=[{"role": "user", "content": "fail"}]), 500, "api_error", "A step failed")
    engine.die()
    refused(await ask(), 503, "overloaded_error")


async def test_a_failure_in_a_stream(ask):
    found = events(await ask(messages=[{"role": "user", "content": "fail"}], stream=True))
    assert found[-1]["type"] == "error"
    assert found[-1]["error"]["type"] == "api_error"
    assert "/srv" not in found[-1]["error"]["message"]


async def test_limits_and_keys():
    config = ServerConfig(api_key=["secret"], max_body_bytes=1000)
    async with client_of(create_app(FakeEngine(), config, ["m"])) as client:
        body = {"messages": HELLO, "max_tokens": 1}
        refused(await client.post("/v1/messages", json=body), 401, "authentication_error")
        wrong = {"x-api-key": "wrong"}
        refused(await client.post("/v1/messages", json=body, headers=wrong), 401, "authentication_error")
        for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
            assert (await client.post("/v1/messages", json=body, headers=headers)).status_code == 200
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
        assert (await client.get("/v1/models", headers={"x-api-key": ""})).status_code == 401
        large = {"messages": [{"role": "user", "content": "x" * 2000}], "max_tokens": 1}
        headers = {"x-api-key": "secret"}
        refused(await client.post("/v1/messages", json=large, headers=headers), 413, "request_too_large")
