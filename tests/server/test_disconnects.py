"""A client that leaves: its requests are aborted, and the server goes on. Over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import httpx
import pytest
from fake_engine import FakeEngine
from live_server import live_server, until

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app

pytestmark = pytest.mark.anyio

LONG = {"prompt": "hello", "max_tokens": 1_000_000}


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine(max_model_len=1 << 21, step_seconds=0.001)


@pytest.fixture
async def url(engine: FakeEngine) -> AsyncIterator[str]:
    async with live_server(create_app(engine, ServerConfig(), ["m"])) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    limits = httpx.Limits(max_connections=1000)
    async with httpx.AsyncClient(base_url=url, timeout=30, limits=limits) as client:
        yield client


async def works(client: httpx.AsyncClient, engine: FakeEngine) -> None:
    """The server still answers, and nothing is left in the engine."""
    await until(lambda: engine.num_running == 0)
    response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert response.json()["choices"][0]["text"] == "ab"


async def test_streaming_client_leaves(client, engine: FakeEngine):
    async with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as response:
        async for line in response.aiter_lines():
            if line:
                break
        assert engine.num_running == 1
    await works(client, engine)
    assert len(engine.aborted) == 1


async def test_waiting_client_leaves(client, engine: FakeEngine):
    asked = asyncio.create_task(client.post("/v1/completions", json=LONG))
    await until(lambda: engine.num_running == 1)
    asked.cancel()
    await works(client, engine)
    assert len(engine.aborted) == 1


async def test_all_prompts_of_a_client_that_leaves_are_aborted(client, engine: FakeEngine):
    body = {**LONG, "prompt": ["a"] * 20, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line:
                break
        assert engine.num_running == 20
    await works(client, engine)
    assert len(engine.aborted) == 20


@pytest.mark.parametrize("stream", [False, True])
async def test_200_cancelled_at_once(client, engine: FakeEngine, stream):
    async def ask() -> None:
        async with client.stream("POST", "/v1/completions", json={**LONG, "stream": stream}) as response:
            async for _ in response.aiter_lines():
                pass

    tasks = [asyncio.create_task(ask()) for _ in range(200)]
    await until(lambda: engine.num_running == 200, seconds=30)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await works(client, engine)
    assert len(engine.aborted) == 200


async def test_client_that_never_finishes_its_body(url, client, engine: FakeEngine):
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: 100\r\n\r\n{"
    )
    await writer.drain()
    writer.close()
    await works(client, engine)


async def test_garbage_instead_of_http(url, client, engine: FakeEngine):
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"\x16\x03\x01 not http at all\r\n\r\n")
    assert b"400" in await reader.read(100)
    writer.close()
    await works(client, engine)


async def test_a_client_that_does_not_read_gets_all_when_it_does(url, engine: FakeEngine):
    """Backpressure: outputs are merged while nobody reads, and none is lost."""
    engine.step_seconds = 0
    count = 20_000
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = json.dumps({"prompt": "x", "stream": True, "max_tokens": count}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    )
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await until(lambda: len(engine.finished) == 1, seconds=60)
    received = b""
    while chunk := await reader.read(1 << 20):
        received += chunk
    writer.close()
    assert received.count(b"data: ") < count
    events = [
        json.loads(line.removeprefix(b"data: "))
        for line in received.splitlines()
        if line.startswith(b"data: {")
    ]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert len(text) == count
    assert text == ("abcdefghijklmnopqrstuvwxyz" * 1000)[:count]


async def test_two_requests_on_one_connection(client, engine: FakeEngine):
    for _ in range(2):
        response = await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, "stream": True})
        assert response.text.endswith("data: [DONE]\n\n")
    with contextlib.suppress(httpx.HTTPError):
        await client.get("/health")
    assert engine.aborted == []
