"""Clients that leave at every stage, in every protocol, and many good and bad ones at once. Over real sockets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from live_server import live_server, until
from pydantic import ValidationError

from jaxserve.config import ServerConfig
from jaxserve.errors import InvalidRequestError
from jaxserve.server.anthropic.content import parse_messages
from jaxserve.server.anthropic.requests import CountTokensRequest, MessageRequest
from jaxserve.server.app import create_app
from jaxserve.server.openai.chat_batch import BatchChatRequest
from jaxserve.server.openai.generate import GenerateRequest
from jaxserve.server.openai.requests import ChatCompletionRequest, CompletionRequest
from jaxserve.server.openai.responses_api.input_items import chat_messages, parse_input
from jaxserve.server.openai.responses_api.requests import ResponseRequest
from jaxserve.server.openai.tokenize import DetokenizeRequest, TokenizeRequest
from jaxserve.tokenizer.prompted_tools import in_messages

pytestmark = pytest.mark.anyio

LONG = 100_000
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": LONG},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": LONG},
    "/v1/responses": {"input": "hello", "max_output_tokens": LONG},
    "/v1/messages": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": LONG},
    "/inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {"max_tokens": LONG}},
}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(max_model_len=1 << 18, step_seconds=0.001)


@pytest.fixture
async def url(engine: FakeEngine) -> AsyncIterator[str]:
    config = ServerConfig(max_body_bytes=1 << 16, response_store_bytes=1 << 20)
    async with live_server(create_app(engine, config, ["m"])) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(
        base_url=url, timeout=30, limits=httpx.Limits(max_connections=200)
    ) as client:
        yield client


def raw(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    return f"{head}\r\n\r\n".encode() + content


async def is_well(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    await until(lambda: engine.num_running == 0)
    response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert response.json()["choices"][0]["text"] == "ab"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_at_every_stage(url, client, engine: FakeEngine, path, stream):
    """After parts of the request, after all of it, after parts of the answer."""
    host, port = url.removeprefix("http://").split(":")
    request = raw(path, {**BODIES[path], "stream": stream})
    for sent in (1, 40, len(request) - 1, len(request)):
        for received in (0, 1, 300, 3000) if sent == len(request) else (0,):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(request[:sent])
            await writer.drain()
            if received and stream:
                await reader.readexactly(received)
            elif sent == len(request):
                await asyncio.sleep(0.01)
            writer.close()
    await is_well(client, engine)


async def test_a_background_response_outlives_its_client(url, client, engine: FakeEngine):
    host, port = url.removeprefix("http://").split(":")
    body = {"input": "hello", "max_output_tokens": 200, "background": True, "stream": True, "request_id": "x"}
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw("/v1/responses", body))
    await reader.readexactly(300)
    writer.close()
    await until(lambda: engine.num_running == 0)
    assert engine.aborted == []
    response = (await client.get("/v1/responses/resp_x")).json()
    assert response["usage"]["output_tokens"] == 200
    await is_well(client, engine)


async def test_many_background_responses_cancelled_and_deleted_at_once(client, engine: FakeEngine):
    body = {**BODIES["/v1/responses"], "background": True}
    made = await asyncio.gather(*(client.post("/v1/responses", json=body) for _ in range(24)))
    paths = [f"/v1/responses/{response.json()['id']}" for response in made]
    answers = await asyncio.gather(
        *(client.post(f"{path}/cancel") for path in paths),
        *(client.delete(path) for path in paths[::2]),
        *(client.post(f"{path}/cancel") for path in paths),
        *(client.get(path) for path in paths),
    )
    assert {answer.status_code for answer in answers} <= {200, 404}
    for path in paths[1::2]:
        assert (await client.get(path)).json()["status"] == "cancelled"
    await is_well(client, engine)


async def test_running_background_responses_are_bounded(client, engine: FakeEngine):
    body = {**BODIES["/v1/responses"], "input": "x" * 50_000, "background": True}
    statuses = [(await client.post("/v1/responses", json=body)).status_code for _ in range(40)]
    accepted = statuses.count(200)
    assert statuses == [200] * accepted + [503] * (40 - accepted)
    assert 5 < accepted < 30
    assert (
        await client.post("/v1/responses", json={"input": "x", "max_output_tokens": 1})
    ).status_code == 200
    await engine.abort([admitted.request_id for admitted in engine.admitted])
    await is_well(client, engine)


NASTY: list[bytes] = [
    b"", b"{", b"null", b"[]", b"5", b'"x"', b"\xff\xfe", b"{}" * 100, b"[" * 10_000, b'{"a":' * 5000,
    b'{"messages": NaN}', b'{"input": 1e999}', b'{"prompt": "\\ud800"}', b'{"prompt": "\\u0000"}',
    b'{"messages": [{"role": "user", "content": "\\udfff"}], "max_tokens": 1}',
    b'{"input": "\\ud800\\ud800", "max_output_tokens": 1}', b'{"model": "\xf0\x9f\x98\x80"}',
    b'{"messages": [{"role": "user", "content": ["x"]}], "max_tokens": 1}',
    b'{"input": [[]]}', b'{"prompt": [[[]]]}', b'{"prompt": [true]}', b'{"token_ids": [-1]}',
    b'{"input": "x", "metadata": {"a": {"b": 1}}}', b'{"input": "x", "previous_response_id": "../../etc/passwd"}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "tools": [[]]}',
    b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 9007199254740993000000000}',
    b'{"input": "x", "max_output_tokens": 1, "text": {"format": {"type": "json_schema", "name": "x",'
    b' "schema": {"$ref": "#"}}}}',
    b"x" * 100_000,
]  # fmt: skip


async def test_good_and_bad_ones_at_once(client, engine: FakeEngine):
    """64 at a time: the good ones are all answered, the bad ones all refused."""
    good = {path: {**body} for path, body in BODIES.items()}
    for path, body in good.items():
        name = {"/v1/responses": "max_output_tokens"}.get(path, "max_tokens")
        if path == "/inference/v1/generate":
            body["sampling_params"] = {"max_tokens": 3}
        else:
            body[name] = 3
    gate = asyncio.Semaphore(64)

    async def post(path: str, content: bytes) -> int:
        async with gate:
            response = await client.post(path, content=content, headers={"content-type": "application/json"})
            assert response.status_code != 200 or response.content
            return response.status_code

    work = [
        (path, content, expected)
        for path, body in good.items()
        for content, expected in [
            *((json.dumps({**body, "stream": stream}).encode(), True) for stream in (False, True)),
            *((nasty, False) for nasty in NASTY),
        ]
        for _ in range(2)
    ]
    statuses = await asyncio.gather(*(post(path, content) for path, content, _ in work))
    for (path, content, expected), status in zip(work, statuses):
        if expected:
            assert status == 200, (path, content)
        else:
            assert status < 500, (path, content[:100])
    await is_well(client, engine)


@pytest.mark.parametrize(
    "path", ["/v1/responses/..%2f..%2fx", "/v1/responses/%00", "/v1/responses/" + "x" * 5000]
)
async def test_strange_ids(client, path):
    for response in (
        await client.get(path),
        await client.delete(path),
        await client.post(f"{path}/cancel"),
        await client.get(f"{path}/input_items"),
    ):
        assert response.status_code in (404, 405)
        assert "error" in response.json()


def test_thousands_of_small_pieces_take_linear_time():
    """A body may hold as many pieces as bytes allow; joining them one by one would take minutes."""
    text = "x" * 500
    count = 20_000
    began = time.monotonic()
    chat_messages(parse_input([{"role": "assistant", "content": text}] * count))
    parse_messages([{"role": "user", "content": [{"type": "text", "text": text}] * count}])
    in_messages([{"role": "tool", "content": text, "tool_call_id": "c"}] * count, None)
    assert time.monotonic() - began < 10


REQUESTS = [
    ChatCompletionRequest, CompletionRequest, ResponseRequest, MessageRequest, CountTokensRequest, TokenizeRequest,
    DetokenizeRequest, GenerateRequest, BatchChatRequest,
]  # fmt: skip
MANY = 3000
FLOODS: list[Any] = [
    *([wrong] * MANY for wrong in (5, "a", [], {})),
    *({str(i): wrong for i in range(MANY)} for wrong in (5, "a", [], {})),
]


@pytest.mark.parametrize("model", REQUESTS, ids=lambda model: model.__name__)
def test_a_thousands_of_mistakes_are_not_listed(model):
    """A body of some megabytes could hold millions: listing them all took minutes and gigabytes."""
    assert num_errors(model, {str(i): 5 for i in range(MANY)}) < 1100
    for name in model.model_fields:
        for flood in FLOODS:
            assert num_errors(model, {name: flood}) < 1100, name
    if issubclass(model, GenerateRequest):
        for flood in FLOODS:
            body = {"token_ids": [1], "sampling_params": {"stop_token_ids": flood, "logit_bias": flood}}
            assert num_errors(model, body) < 1100


def num_errors(model: Any, body: dict[str, Any]) -> int:
    try:
        model.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    except InvalidRequestError:
        return 1
    return 0
