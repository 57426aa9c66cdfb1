"""Reading and checking what the server answers."""

from __future__ import annotations

import json
from typing import Any

import httpx
from fastapi import FastAPI


def client_of(app: FastAPI) -> httpx.AsyncClient:
    """A client that reaches ``app`` without a socket."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """The error of a refused request, whose form must be OpenAI's."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status
    assert body["error"]["message"]
    if param is not None:
        assert body["error"]["param"] == param, body
    return body["error"]
