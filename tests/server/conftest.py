"""A fake engine, its application, and an HTTP client that reaches it without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from fastapi import FastAPI
from http_support import client_of

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app

MODEL = "fake-model"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def app(engine: FakeEngine) -> FastAPI:
    return create_app(engine, ServerConfig(), [MODEL, "alias"], model_root="/models/fake")


@pytest.fixture
async def client(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(app) as client:
        yield client


Post = Callable[..., Any]


@pytest.fixture
def complete(client: httpx.AsyncClient) -> Post:
    """Post to /v1/completions."""

    async def post(**body: Any) -> httpx.Response:
        return await client.post("/v1/completions", json={"prompt": "hello", **body})

    return post


@pytest.fixture
def chat(client: httpx.AsyncClient) -> Post:
    """Post to /v1/chat/completions."""

    async def post(**body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hello"}]
        return await client.post("/v1/chat/completions", json={"messages": messages, **body})

    return post
