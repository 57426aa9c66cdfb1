"""The official client against the server, over a real socket."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from fake_engine import FakeEngine
from live_server import live_server, until

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
