"""The Ingress over replicas that die at chosen moments; no Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from starlette.types import Message

from jaxserve.ray_serve import ingress as ingress_module
from jaxserve.ray_serve.calls import Fetched, HTTPCall, ReplicaFailed, answer
from jaxserve.ray_serve.ingress import MAX_DEATHS, Ingress, merge_metrics, sum_loads

START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-request-id", b"r")],
}


def body(data: bytes, *, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": data, "more_body": more}


class Dead(Exception):
    """Stands for Ray's."""


Script = list[list[Message] | Exception]


class Replicas:
    """A handle whose calls follow scripts, one a call; ``hang`` never answers."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = list(scripts)
        self.calls: list[HTTPCall] = []
        self.cancelled = 0
        self.handle = self

    def options(self, *, stream: bool) -> Replicas:
        assert stream
        return self

    def remote(self, call: HTTPCall) -> Replicas:
        self.calls.append(call)
        return self

    def __aiter__(self) -> AsyncGenerator[list[Message]]:
        return self._play(self.scripts.pop(0))

    async def _play(self, script: Script) -> AsyncGenerator[list[Message]]:
        for item in script:
            if isinstance(item, Exception):
                raise item
            yield item
        if not script:
            await asyncio.sleep(3600)

    def cancel(self) -> None:
        self.cancelled += 1


@pytest.fixture(autouse=True)
def _parts_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module, "configure_logging", lambda *_: None)
    monkeypatch.setattr(ingress_module, "_replica_deaths", lambda: (ReplicaFailed, Dead))


async def ask(replicas: Replicas, path: str = "/v1/chat/completions", data: bytes = b"{}") -> list[Message]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": [], "root_path": ""}
    response = await Ingress(replicas, 100, "info", "text")(None)  # type: ignore[arg-type]
    await response(scope, receive, send)
    return sent


def text_of(messages: list[Message]) -> bytes:
    return b"".join(message.get("body", b"") for message in messages)


def test_what_had_not_begun_is_asked_again_and_keeps_its_id() -> None:
    replicas = Replicas([Dead()], [ReplicaFailed("r1")], [[START, body(b"x")], [body(b"y", more=False)]])
    sent = asyncio.run(ask(replicas))
    assert sent[0]["status"] == 200
    assert text_of(sent) == b"xy"
    ids = {dict(call.scope["headers"])[b"x-request-id"] for call in replicas.calls}
    assert len(ids) == 1
    assert [call.avoid for call in replicas.calls] == [frozenset(), frozenset(), frozenset({"r1"})]
    assert replicas.cancelled == 2  # none of a complete answer


def test_what_kills_replicas_is_not_asked_for_ever() -> None:
    replicas = Replicas(*[[Dead()] for _ in range(MAX_DEATHS + 1)])
    sent = asyncio.run(ask(replicas))
    assert sent[0]["status"] == 503
    assert len(replicas.calls) == MAX_DEATHS
    assert "died" in json.loads(text_of(sent))["error"]["message"]


@pytest.mark.parametrize(
    "path, last",
    [
        ("/v1/chat/completions", b"data: [DONE]\n\n"),
        ("/v1/messages", b"event: error\n"),
        ("/v1/responses", b"event: error\n"),
    ],
)
def test_a_stream_that_had_begun_ends_with_an_error_event(path: str, last: bytes) -> None:
    replicas = Replicas([[START, body(b"data: 1\n\n")], Dead()])
    sent = asyncio.run(ask(replicas, path))
    assert len(replicas.calls) == 1
    text = text_of(sent)
    assert text.startswith(b"data: 1\n\n")
    assert last in text
    assert b"has died" in text
    assert sent[-1]["more_body"] is False


def test_half_a_body_is_broken_off_and_other_errors_are_not_repeated() -> None:
    plain = {**START, "headers": [(b"content-type", b"application/json")]}
    with pytest.raises(Exception, match="has died"):
        asyncio.run(ask(Replicas([[plain, body(b"{")], Dead()])))
    replicas = Replicas([ValueError("a secret")])
    sent = asyncio.run(ask(replicas))
    assert sent[0]["status"] == 500
    assert b"secret" not in text_of(sent)
    assert len(replicas.calls) == 1


def test_a_large_body_reaches_the_application_a_byte_too_long() -> None:
    replicas = Replicas([[{**START, "status": 413}, body(b"", more=False)]])
    asyncio.run(ask(replicas, data=b"x" * 5000))
    assert len(replicas.calls[0].body) == 101


def test_health_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingress_module, "HEALTH_SECONDS", 0.05)
    replicas = Replicas([])
    sent = asyncio.run(ask(replicas, "/health"))
    assert sent[0]["status"] == 503
    assert replicas.cancelled == 1


def test_metrics_of_all_replicas_are_one_page() -> None:
    page = (
        '# HELP a_total A.\n# TYPE a_total counter\na_total{m="x"} 1.0\n# HELP b B.\n# TYPE b gauge\nb 2.0\n'
    )
    answers = [Fetched(name, 200, [], page.encode()) for name in ("r2", "r1")]
    assert merge_metrics(answers).decode().splitlines() == [
        "# HELP a_total A.", "# TYPE a_total counter", 'a_total{replica="r1",m="x"} 1.0',
        'a_total{replica="r2",m="x"} 1.0',
        "# HELP b B.", "# TYPE b gauge", 'b{replica="r1"} 2.0', 'b{replica="r2"} 2.0',
    ]  # fmt: skip
    assert sum_loads([Fetched("r", 200, [], b'{"server_load": 3}')] * 2) == b'{"server_load": 6}'


def application(log: list[str]) -> Callable[..., Any]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["body"] == b"hello"
        await send(START)
        await send(body(b"1"))
        log.append((await receive())["type"])
        await send(body(b"2", more=False))

    return app


def test_an_application_learns_that_its_client_left_and_is_not_cut_off() -> None:
    async def leave() -> list[str]:
        log: list[str] = []
        messages = answer(application(log), HTTPCall({"type": "http"}, b"hello"))
        assert text_of(await anext(messages)) == b"1"
        await messages.aclose()
        for _ in range(5):
            await asyncio.sleep(0)
        return log

    assert asyncio.run(leave()) == ["http.disconnect"]
