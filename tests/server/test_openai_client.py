"""The official client against the server, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pydantic
import pytest
from fake_engine import FakeEngine
from live_server import live_server, until
from scripted_engine import ScriptedEngine

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app

pytestmark = pytest.mark.anyio

HELLO = [{"role": "user", "content": "hello"}]
KEY = "sk-test"


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    app = create_app(engine, ServerConfig(api_key=[KEY], enable_prompt_tokens_details=True), ["m"])
    async with live_server(app) as url:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
        async with client:
            yield client


async def test_models(client):
    models = [model async for model in client.models.list()]
    assert [(model.id, model.owned_by) for model in models] == [("m", "jaxserve")]
    assert (await client.models.retrieve("m")).id == "m"


async def test_chat(client):
    answer = await client.chat.completions.create(
        model="m", messages=HELLO, max_completion_tokens=3, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].message.content == "abc"
    assert answer.choices[0].finish_reason == "length"
    assert len(answer.choices[0].logprobs.content) == 3
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2
    assert answer.usage.completion_tokens == 3
    assert answer.usage.prompt_tokens_details.cached_tokens == 16


async def test_chat_stream(client):
    stream = await client.chat.completions.create(
        model="m", messages=HELLO, max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "abc"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 3


async def test_chat_stream_helper(client):
    """The client's own accumulation of chunks."""
    async with client.chat.completions.stream(model="m", messages=HELLO, stop="d") as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "abcd"


async def test_completions(client):
    answer = await client.completions.create(model="m", prompt=["a", "b"], max_tokens=2, logprobs=1, seed=7)
    assert [choice.text for choice in answer.choices] == ["ab", "ab"]
    assert answer.choices[0].logprobs.tokens == ["a", "b"]


async def test_completions_stream(client):
    stream = await client.completions.create(model="m", prompt="a", max_tokens=3, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "abc"


async def test_extra_parameters(client, engine: FakeEngine):
    await client.chat.completions.create(
        model="m", messages=HELLO, max_tokens=1, extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True}
    )
    params = engine.admitted[0].params
    assert (params.top_k, params.min_p, params.ignore_eos) == (5, 0.1, True)


async def test_errors(client):
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="m", messages=HELLO, temperature=9)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError) as tools:
        await client.chat.completions.create(
            model="m", messages=HELLO, tools=[{"type": "function", "function": {"name": "f g"}}]
        )
    assert tools.value.param == "tools[0].function.name"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()


async def test_an_error_in_a_stream_is_raised(client):
    stream = await client.completions.create(model="m", prompt="fail", stream=True)
    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass


async def test_leaving_a_stream_aborts(client, engine: FakeEngine):
    engine.step_seconds = 0.005
    stream = await client.completions.create(model="m", prompt="a", max_tokens=1000, stream=True)
    async for _ in stream:
        break
    await stream.close()
    await until(lambda: engine.num_running == 0)
    assert len(engine.aborted) == 1


# --- responses --------------------------------------------------------------------------------------------


async def test_responses(client):
    answer = await client.responses.create(
        model="m", input="hello", max_output_tokens=3, instructions="Be short."
    )
    assert answer.output_text == "abc"
    assert answer.status == "incomplete"
    assert answer.usage.output_tokens == 3
    more = await client.responses.create(
        model="m", input=[*answer.output, {"role": "user", "content": "more"}], max_output_tokens=2
    )
    assert more.output_text == "ab"
    stored = await client.responses.retrieve(more.id)
    assert stored == more
    items = [item async for item in client.responses.input_items.list(more.id, order="asc")]
    assert [item.type for item in items] == ["message", "message"]
    await client.responses.delete(more.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(more.id)


async def test_responses_stream(client):
    async with client.responses.stream(model="m", input="hello", extra_body={"stop": "c"}) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert deltas == ["a", "b", "c"]
    assert final.output_text == "abc"


async def test_responses_in_the_background(client, engine: FakeEngine):
    engine.step_seconds = 0.005
    answer = await client.responses.create(model="m", input="hello", max_output_tokens=900, background=True)
    assert answer.status == "queued"
    assert (await client.responses.cancel(answer.id)).status == "cancelled"
    assert engine.num_running == 0


# --- tools and parsed output ------------------------------------------------------------------------------


class Person(pydantic.BaseModel):
    name: str
    age: int


ADA = '{"name": "Ada", "age": 36}'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@pytest.fixture
async def scripted() -> AsyncIterator[openai.AsyncOpenAI]:
    engine = ScriptedEngine({"Rain": "It rains.", "Weather": CALL, "Who": ADA})
    async with (
        live_server(create_app(engine, ServerConfig(), ["m"])) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


async def test_parsed_output(scripted):
    asked = [{"role": "user", "content": "Who?"}]
    chat = await scripted.chat.completions.parse(model="m", messages=asked, response_format=Person)
    assert chat.choices[0].message.parsed == Person(name="Ada", age=36)
    response = await scripted.responses.parse(model="m", input="Who?", text_format=Person)
    assert response.output_parsed == Person(name="Ada", age=36)


async def test_calls_in_chat(scripted):
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    messages = [{"role": "user", "content": "Weather?"}]
    answer = await scripted.chat.completions.create(model="m", messages=messages, tools=tools)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    assert answer.choices[0].finish_reason == "tool_calls"
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "Rain"}]
    answer = await scripted.chat.completions.create(model="m", messages=messages, tools=tools)
    assert answer.choices[0].message.content == "It rains."


async def test_calls_in_responses(scripted):
    tools = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
    async with scripted.responses.stream(model="m", input="Weather?", tools=tools) as stream:
        events = [event async for event in stream]
        first = await stream.get_final_response()
    (call,) = first.output
    assert (call.name, call.arguments) == ("weather", '{"city": "Paris"}')
    assert "response.function_call_arguments.done" in {event.type for event in events}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
    answer = await scripted.responses.create(
        model="m", input=[result], tools=tools, previous_response_id=first.id
    )
    assert answer.output_text == "It rains."
