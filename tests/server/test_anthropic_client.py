"""Anthropic's official client against the server, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from live_server import live_server, until
from scripted_engine import ScriptedEngine

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app

anthropic: Any = pytest.importorskip("anthropic")  # the environment of the device tests has none

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hello"}]
KEY = "sk-test"
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
TOOL = {
    "name": "weather",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[Any]:
    app = create_app(engine, ServerConfig(api_key=[KEY]), ["m"])
    async with (
        live_server(app) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key=KEY, max_retries=0) as client,
    ):
        yield client


@pytest.fixture
async def scripted() -> AsyncIterator[Any]:
    engine = ScriptedEngine({"Rain": "It rains.", "": f"Let me see.\n{CALL}"})
    async with (
        live_server(create_app(engine, ServerConfig(), ["m"])) as url,
        anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_messages(client):
    message = await client.messages.create(model="m", messages=HELLO, max_tokens=3, system="Be short.")
    assert message.content[0].text == "abc"
    assert message.stop_reason == "max_tokens"
    assert message.usage.output_tokens == 3
    assert message._request_id


async def test_stream(client):
    async with client.messages.stream(
        model="m", messages=HELLO, max_tokens=100, stop_sequences=["d"]
    ) as stream:
        texts = [text async for text in stream.text_stream]
        message = await stream.get_final_message()
    assert "".join(texts) == message.content[0].text == "abcd"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "d")


async def test_counting(client):
    counted = await client.messages.count_tokens(model="m", messages=HELLO)
    message = await client.messages.create(model="m", messages=HELLO, max_tokens=1)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_tools(scripted, stream):
    asked = {"model": "m", "max_tokens": 200, "tools": [TOOL]}
    messages = [{"role": "user", "content": "Weather in Paris?"}]
    if stream:
        async with scripted.messages.stream(**asked, messages=messages) as events:
            message = await events.get_final_message()
    else:
        message = await scripted.messages.create(**asked, messages=messages)
    text, call = message.content
    assert text.text == "Let me see."
    assert (call.name, call.input) == ("weather", {"city": "Paris"})
    assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain"}
    messages += [
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer = await scripted.messages.create(**asked, messages=messages)
    assert answer.content[0].text == "It rains."
    assert answer.stop_reason == "end_turn"


async def test_errors(client):
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        await client.messages.create(model="m", messages=HELLO, max_tokens=1, extra_body={"temperature": 9})
    with pytest.raises(anthropic.NotFoundError):
        await client.messages.create(model="other", messages=HELLO, max_tokens=1)
    with pytest.raises(anthropic.AuthenticationError):
        await client.with_options(api_key="wrong").messages.create(model="m", messages=HELLO, max_tokens=1)


async def test_an_error_in_a_stream_is_raised(client):
    fail = [{"role": "user", "content": "fail"}]
    with pytest.raises(anthropic.APIStatusError):
        async with client.messages.stream(model="m", messages=fail, max_tokens=9) as stream:
            async for _ in stream:
                pass


async def test_leaving_a_stream_aborts(client, engine: FakeEngine):
    engine.step_seconds = 0.005
    async with client.messages.stream(model="m", messages=HELLO, max_tokens=900) as stream:
        async for _ in stream.text_stream:
            break
    await until(lambda: engine.num_running == 0)
    assert len(engine.aborted) == 1
