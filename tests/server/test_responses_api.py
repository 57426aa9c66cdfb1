"""POST /v1/responses: input items, answers, and the events of streams."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from http_support import client_of, error
from pydantic import ValidationError
from scripted_engine import ScriptedEngine
from test_request_fields import EXPECTED, GIVEN

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app
from jaxserve.server.openai.responses_api.input_items import parse_input
from jaxserve.server.openai.responses_api.requests import NOT_HERE, UNSUPPORTED, ResponseRequest

pytestmark = pytest.mark.anyio

THINKS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>"
    "{% endif %}{{ m.content }}\n{% endfor %}<assistant>{% if enable_thinking is false %}<think></think>{% endif %}"
)
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture
def respond(client: httpx.AsyncClient):
    async def post(**body: Any) -> httpx.Response:
        return await client.post("/v1/responses", json={"input": "hello", "max_output_tokens": 4, **body})

    return post


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose names must be their types and whose numbers must have no gap."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    found: list[dict[str, Any]] = []
    for block in response.text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    check_nesting(found)
    return found


def check_nesting(found: list[dict[str, Any]]) -> None:
    """Items open and close one after the other, parts within items, deltas within parts; texts add up."""
    item: dict[str, Any] | None = None
    text = ""
    for event in found:
        kind = event["type"].removeprefix("response.")
        match kind:
            case "output_item.added":
                assert item is None
                item, text = event["item"], ""
                assert item["status"] == "in_progress"
                assert not item.get("content")
                assert not item.get("arguments")
            case "output_item.done":
                assert item is not None
                done = event["item"]
                assert done["id"] == item["id"]
                assert done["status"] in ("completed", "incomplete")
                whole = done["arguments"] if "arguments" in done else done["content"][0]["text"]
                assert whole == text
                item = None
            case _ if kind.endswith(".delta"):
                assert item is not None
                assert event["item_id"] == item["id"]
                text += event["delta"]
            case "output_text.done" | "reasoning_text.done":
                assert event["text"] == text
            case "function_call_arguments.done":
                assert event["arguments"] == text
            case _:
                pass
    assert item is None
    assert found[-1]["type"] in ("response.completed", "response.incomplete", "response.failed")


async def test_a_text(respond, engine: FakeEngine):
    response = (await respond(instructions="Be short.", metadata={"a": "b"}, user="me")).json()
    assert engine.admitted[0].prompt == "<system>Be short.\n<user>hello\n<assistant>"
    assert response["object"] == "response"
    assert response["status"] == "incomplete"
    assert response["incomplete_details"] == {"reason": "max_output_tokens"}
    (message,) = response["output"]
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert [part["text"] for part in message["content"]] == ["abcd"]
    assert response["usage"]["output_tokens"] == 4
    assert response["usage"]["total_tokens"] == response["usage"]["input_tokens"] + 4
    assert (response["metadata"], response["user"]) == ({"a": "b"}, "me")
    assert response["instructions"] == "Be short."


async def test_it_ends_by_itself(respond):
    response = (await respond(stop="c")).json()
    assert response["status"] == "completed"
    assert response["completed_at"] >= response["created_at"]
    assert response["output"][0]["content"][0]["text"] == "abc"
    assert response["output"][0]["status"] == "completed"


async def test_a_stream_says_what_the_answer_says(respond):
    found = events(await respond(stream=True, stop="c"))
    assert [event["type"].removeprefix("response.") for event in found] == [
        "created", "in_progress", "output_item.added", "content_part.added",
        "output_text.delta", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    whole = (await respond(stop="c")).json()
    streamed = found[-1]["response"]
    for response in (whole, streamed):
        for name in ("id", "created_at", "completed_at"):
            del response[name]
        del response["output"][0]["id"]
    assert streamed == whole
    assert found[0]["response"]["status"] == "in_progress"
    assert found[0]["response"]["output"] == []
    assert found[0]["response"]["usage"] is None


async def test_logprobs(respond):
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = (await respond(**asked)).json()
    logprobs = whole["output"][0]["content"][0]["logprobs"]
    assert [entry["token"] for entry in logprobs] == list("abcd")
    assert all(len(entry["top_logprobs"]) == 2 for entry in logprobs)
    assert whole["top_logprobs"] == 2
    found = events(await respond(**asked, stream=True))
    streamed = [entry for event in found if "delta" in event for entry in event["logprobs"]]
    assert streamed == logprobs
    assert (await respond()).json()["output"][0]["content"][0]["logprobs"] == []


@pytest.mark.parametrize("stream", [False, True])
async def test_no_logprob_is_lost(stream):
    text = "<think>Hmm</think>Hi!  "
    body = {"stream": stream, "include": ["message.output_text.logprobs"]}
    response = await ask(ScriptedEngine({"": text}), body, chat_template=THINKS)
    answer = events(response)[-1]["response"] if stream else response.json()
    entries = answer["output"][-1]["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in entries) == text


async def test_parameters_reach_the_engine(respond, engine: FakeEngine):
    await respond(temperature=0.5, top_p=0.5, top_k=7, seed=3, stop=["x"], ignore_eos=True)
    params = engine.admitted[0].params
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.5, 0.5, 7, 3)
    assert (params.stop, params.ignore_eos, params.max_tokens) == (["x"], True, 4)


async def test_no_limit_is_the_rest_of_the_context(respond, engine: FakeEngine):
    await respond(max_output_tokens=None)
    assert engine.admitted[0].params.max_tokens is None


async def test_text_formats(respond, engine: FakeEngine):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    response = (await respond(text={"format": form})).json()
    constraint = engine.admitted[0].params.structured_outputs
    assert json.loads(constraint.json) == schema
    assert response["text"]["format"] == form
    await respond(text={"format": {"type": "json_object"}})
    assert engine.admitted[1].params.structured_outputs.json_object
    await respond(text={"format": {"type": "text"}, "verbosity": "medium"})
    assert engine.admitted[2].params.structured_outputs is None


async def test_a_failure_before_the_end(client):
    body = {"input": "fail", "max_output_tokens": 10}
    error(await client.post("/v1/responses", json=body), 500)
    found = events(await client.post("/v1/responses", json={**body, "stream": True}))
    failed = found[-1]["response"]
    assert failed["status"] == "failed"
    assert failed["error"]["code"] == "server_error"
    assert "/srv" not in failed["error"]["message"]
    assert failed["output"][0]["content"][0]["text"] == "abc"
    assert failed["output"][0]["status"] == "incomplete"


# --- tools and reasoning ----------------------------------------------------------------------------------


async def ask(engine: FakeEngine, body: dict[str, Any], **options: Any) -> httpx.Response:
    async with client_of(create_app(engine, ServerConfig(), ["m"], **options)) as client:
        return await client.post("/v1/responses", json={"input": "hello", **body})


@pytest.mark.parametrize("stream", [False, True])
async def test_calls(stream):
    engine = ScriptedEngine({"": f"Let me see.\n{CALL}\n{CALL.replace('Paris', 'Rome')}"})
    response = await ask(engine, {"tools": [TOOL], "stream": stream})
    body = events(response)[-1]["response"] if stream else response.json()
    assert "weather" in engine.admitted[0].prompt
    assert body["status"] == "completed"
    message, first, second = body["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert (first["type"], first["name"], json.loads(first["arguments"])) == (
        "function_call",
        "weather",
        {"city": "Paris"},
    )
    assert json.loads(second["arguments"]) == {"city": "Rome"}
    assert first["call_id"] != second["call_id"]
    assert body["tools"] == [TOOL]
    assert body["tool_choice"] == "auto"


async def test_one_call_at_most():
    engine = ScriptedEngine({"": CALL + CALL})
    body = (await ask(engine, {"tools": [TOOL], "parallel_tool_calls": False})).json()
    assert [item["type"] for item in body["output"]] == ["function_call"]
    assert body["parallel_tool_calls"] is False


async def test_a_call_that_is_required():
    engine = ScriptedEngine({"": '[{"name": "weather", "parameters": {"city": "Oslo"}}]'})
    body = (await ask(engine, {"tools": [TOOL], "tool_choice": "required"})).json()
    assert engine.admitted[0].params.structured_outputs is not None
    (call,) = body["output"]
    assert (call["name"], json.loads(call["arguments"])) == ("weather", {"city": "Oslo"})
    engine = ScriptedEngine({"": '{"city": "Oslo"}'})
    choice = {"type": "function", "name": "weather"}
    body = (await ask(engine, {"tools": [TOOL], "tool_choice": choice})).json()
    assert json.loads(body["output"][0]["arguments"]) == {"city": "Oslo"}
    assert body["tool_choice"] == choice


async def test_no_calls_without_a_choice():
    engine = ScriptedEngine({"": CALL})
    body = (await ask(engine, {"tools": [TOOL], "tool_choice": "none"})).json()
    assert [item["type"] for item in body["output"]] == ["message"]


async def test_results_of_calls_come_back(respond, engine: FakeEngine):
    await respond(
        input=[
            {"role": "user", "content": "Weather in Paris?"},
            {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Paris"}'},
            {"type": "function_call_output", "call_id": "c1", "output": "Rain"},
        ]
    )
    prompt = engine.admitted[0].prompt
    assert '"city": "Paris"' in prompt
    assert "<tool_response>\nRain\n</tool_response>" in prompt


@pytest.mark.parametrize("stream", [False, True])
async def test_reasoning(stream):
    engine = ScriptedEngine({"": "<think>Hmm, hello.</think>\n\nHi!"})
    response = await ask(engine, {"stream": stream}, chat_template=THINKS)
    body = events(response)[-1]["response"] if stream else response.json()
    thought, message = body["output"]
    assert thought["type"] == "reasoning"
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hmm, hello."}]
    assert message["content"][0]["text"] == "Hi!"


async def test_reasoning_can_be_left_out_or_turned_off():
    engine = ScriptedEngine({"": "<think>Hmm</think>Hi!"})
    body = (await ask(engine, {"include_reasoning": False}, chat_template=THINKS)).json()
    assert [item["type"] for item in body["output"]] == ["message"]
    body = (await ask(engine, {"reasoning": {"effort": "none"}}, chat_template=THINKS)).json()
    assert engine.admitted[1].prompt.endswith("<think></think>")
    assert body["reasoning"] == {"effort": "none", "summary": None}
    refused = await ask(engine, {"reasoning": {"effort": "low"}})
    error(refused, 400, "reasoning.effort")


async def test_an_answer_can_be_sent_back(engine: FakeEngine):
    """What came out goes in again: reasoning, text and calls of one turn are one message."""
    scripted = ScriptedEngine({"Rain": "It rains.", "": f"<think>Hmm</think>Wait.\n{CALL}"})
    first = (await ask(scripted, {"tools": [TOOL]}, chat_template=THINKS)).json()
    call = first["output"][-1]
    items = [
        {"role": "user", "content": "hello"},
        *first["output"],
        {"type": "function_call_output", "call_id": call["call_id"], "output": "Rain"},
    ]
    second = (await ask(scripted, {"tools": [TOOL], "input": items}, chat_template=THINKS)).json()
    assert second["output"][-1]["content"][0]["text"] == "It rains."
    prompt = scripted.admitted[-1].prompt
    assert "<assistant><think>Hmm</think>Wait.\n<tool_call>" in prompt


# --- mistakes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body,param",
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "nobody", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": "x", "extra": 1}]}, "input[0].extra"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
         "input[0].arguments"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]},
         "input[0].encrypted_content"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [{**TOOL, "parameters": {"type": "string"}}]}, "tools[0].parameters.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"truncation": "auto"}, "body.truncation"),
        ({"include": ["reasoning.encrypted_content"]}, "body.include.0"),
        ({"reasoning": {"summary": "detailed"}}, "body.reasoning.summary"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"n": 2}, "n"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": 3}, "max_tokens"),
        ({"background": True, "store": False}, "background"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}},
         "body.stream_options.include_obfuscation"),
        ({"max_output_tokens": 0}, "body.max_output_tokens"),
        ({"max_output_tokens": 100_000}, "max_output_tokens"),
        ({"top_logprobs": 21}, "body.top_logprobs"),
        ({"metadata": {"a": 5}}, "body.metadata.a"),
        ({"metadata": {str(i): "" for i in range(17)}}, "body.metadata"),
        ({"structured_outputs": {"regex": "a"}, "text": {"format": {"type": "json_object"}}},
         "structured_outputs"),
    ],
)  # fmt: skip
async def test_mistakes_are_named(respond, engine: FakeEngine, body, param):
    error(await respond(**body), 400, param)
    assert engine.admitted == []


async def test_an_unknown_model(respond):
    error(await respond(model="other"), 404, "model")


def test_what_asks_for_nothing_is_accepted():
    body = {
        "input": "x", "conversation": None, "n": 1, "context_management": [], "service_tier": "auto",
        "max_tool_calls": 3, "prompt_cache_key": "k", "prompt_cache_retention": "24h", "tools": [],
        "tool_choice": "auto", "truncation": "disabled", "reasoning": {"summary": "auto"},
    }  # fmt: skip
    assert ResponseRequest.model_validate(body).chat_tool_choice is None


def test_items_get_ids():
    items = parse_input("hello")
    assert items[0]["id"].startswith("msg_")
    assert items[0]["content"] == [{"type": "input_text", "text": "hello"}]
    assert parse_input([{"role": "user", "content": "x", "id": "mine"}])[0]["id"] == "mine"


@pytest.mark.parametrize("name", sorted(UNSUPPORTED.keys() - ResponseRequest.model_fields.keys()))
def test_what_is_not_offered_is_refused_by_name(name):
    with pytest.raises(ValidationError, match=name):
        ResponseRequest.model_validate({"input": "x", name: {"some": "thing"}})


async def test_every_sampling_parameter_reaches_the_engine(respond, engine: FakeEngine):
    given = {name: value for name, value in GIVEN.items() if name not in NOT_HERE}
    await respond(**given)
    params = engine.admitted[0].params
    for name in given:
        expected = EXPECTED[name]
        found = getattr(params, name)
        assert found == expected or set(expected) <= set(found), name
