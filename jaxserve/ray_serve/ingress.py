"""Ingress: takes HTTP requests, has a replica answer each one, and another one where a replica died before it did.

A request is repeated as long as its client has seen nothing of an answer. After that the stream ends with an error
event, in the form of its protocol.
"""

from __future__ import annotations

import asyncio
import json
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jaxserve.errors import EngineDeadError, RequestFailedError
from jaxserve.logs import configure_logging
from jaxserve.ray_serve.calls import Fetched, HTTPCall, ReplicaFailed, plain_scope, read_body
from jaxserve.ray_serve.prefix_routing import prefix_hashes
from jaxserve.server.anthropic.messages import encode_event
from jaxserve.server.errors import anthropic_error, error_response, is_anthropic
from jaxserve.server.middleware import route_path
from jaxserve.server.streaming import DONE, error_event

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Replicas that one request may see dying; perhaps it is what kills them."""
HEALTH_SECONDS = 5.0
"""For a replica to say that it is healthy."""


class Ingress:
    """What Serve's HTTP proxy talks to.

    Args:
        replicas: the handle of the EngineReplica deployment.
        max_body_bytes: no more of a body is read.
        log_level, log_format: of this process's log.
    """

    def __init__(self, replicas: Any, max_body_bytes: int, log_level: str, log_format: str) -> None:
        configure_logging(log_level, log_format)
        self._replicas = replicas
        self._max_body_bytes = max_body_bytes

    async def __call__(self, request: Request) -> Response:
        """The response, which does its work when it is called."""
        return RoutedResponse(self._replicas, self._max_body_bytes)


class RoutedResponse(Response):
    """A replica's answer to a request.

    Args:
        replicas, max_body_bytes: the Ingress's.
    """

    def __init__(self, replicas: Any, max_body_bytes: int) -> None:
        super().__init__()
        self._replicas = replicas
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            body = await read_body(receive, self._max_body_bytes)
        except ConnectionError:
            return
        plain = plain_scope(scope)
        plain["headers"], request_id = _with_request_id(scope["headers"])
        scope.setdefault("state", {})["request_id"] = request_id
        call = HTTPCall(plain, body)
        path = route_path(scope)
        if path in GATHERED:
            response = await self._gather(call, GATHERED[path])
            await response(scope, receive, send)
        elif path in ("/health", "/ping"):
            await self._check_health(call, scope, receive, send)
        else:
            await Relay(scope, send, self._replicas).run(replace(call, hashes=prefix_hashes(body)))

    async def _gather(self, call: HTTPCall, merge: Merge) -> Response:
        results: list[Any] = await self._replicas.broadcast("fetch", call).results_async(
            return_exceptions=True
        )
        answers = [result for result in results if isinstance(result, Fetched)]  # the others are just dying
        refused = next((answer for answer in answers if answer.status != 200), None)
        chosen = refused or (answers[0] if answers else Fetched("", 503, [], b""))
        body = merge(answers) if answers and refused is None else chosen.body
        response = Response(body, chosen.status)
        response.raw_headers += [header for header in chosen.headers if header[0] != b"content-length"]
        return response

    async def _check_health(self, call: HTTPCall, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask any replica; without one the request would wait for it."""
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                await Relay(scope, send, self._replicas).run(call)
        except TimeoutError:
            error = EngineDeadError(f"No replica has answered in {HEALTH_SECONDS:g} s.")
            await error_response(error, scope=scope)(scope, receive, send)


class Relay:
    """Passes one request on until a replica has answered it.

    Args:
        scope, send: the client's.
        replicas: the deployment's handle.
    """

    def __init__(self, scope: Scope, send: Send, replicas: Any) -> None:
        self._scope = scope
        self._send = send
        self._replicas = replicas
        self._begun = self._ended = self._streams = False

    async def run(self, call: HTTPCall) -> None:
        """Answer; only cancelled where the client leaves."""
        deaths = 0
        while True:
            try:
                await self._ask(call)
            except _replica_deaths() as error:
                if isinstance(error, ReplicaFailed):
                    call = replace(call, avoid=call.avoid | {str(error.args[0])})
            except Exception:
                logger.exception("A replica failed to answer.")
                return await self._fail(RequestFailedError("The replica failed to answer this request."))
            else:
                return None
            if self._ended:
                return None
            deaths += 1
            if self._begun or deaths >= MAX_DEATHS:
                return await self._fail(EngineDeadError("The replica that answered this request has died."))
            logger.warning("A replica died before it answered a request: another one gets it.")

    async def _ask(self, call: HTTPCall) -> None:
        messages = self._replicas.options(stream=True).handle.remote(call)
        try:
            async for batch in messages:
                for message in batch:
                    await self._pass_on(message)
        finally:
            if not self._ended:
                messages.cancel()

    async def _pass_on(self, message: Message) -> None:
        self._begun = True
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            self._streams = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self._ended = message["type"] == "http.response.body" and not message.get("more_body", False)
        await self._send(message)

    async def _fail(self, error: Exception) -> None:
        if not self._begun:
            await error_response(error, scope=self._scope)(self._scope, _nothing, self._send)
        elif self._streams:
            await self._send(
                {"type": "http.response.body", "body": self._last_event(error), "more_body": False}
            )
        else:
            raise error  # half a body: all that is left is to break the connection off

    def _last_event(self, error: Exception) -> bytes:
        if is_anthropic(self._scope):
            return encode_event("error", anthropic_error(error, self._scope["state"]["request_id"]))
        if route_path(self._scope).startswith("/v1/responses"):
            return b"event: error\ndata: " + json.dumps(
                {"type": "error", "code": "server_error", "message": str(error), "param": None}
            ).encode() + b"\n\n"  # fmt: skip
        return error_event(error) + DONE


def _replica_deaths() -> tuple[type[Exception], ...]:
    """What is raised when a replica has gone, is unreachable, or says that its engine has died."""
    from ray.exceptions import NodeDiedError, OwnerDiedError, RayActorError, WorkerCrashedError

    return (ReplicaFailed, RayActorError, WorkerCrashedError, OwnerDiedError, NodeDiedError)


def _with_request_id(headers: Sequence[tuple[bytes, bytes]]) -> tuple[list[tuple[bytes, bytes]], str]:
    """The headers with an X-Request-Id, so that every replica that tries uses the same one."""
    for name, value in headers:
        if name == b"x-request-id":
            return [*headers], value.decode("latin-1")
    request_id = uuid.uuid4().hex
    return [*headers, (b"x-request-id", request_id.encode())], request_id


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


# --- asked of every replica -----------------------------------------------------------------------------------

Merge = Callable[[Sequence[Fetched]], bytes]


def merge_metrics(answers: Sequence[Fetched]) -> bytes:
    """All samples, with the label ``replica``; those of a metric together, as Prometheus' format wants them."""
    groups: dict[str, list[str]] = {}
    for answer in sorted(answers, key=lambda answer: answer.replica):
        lines: list[str] = []
        for line in answer.body.decode().splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                lines = groups.setdefault(name, [])
                first = not lines
            if not line.startswith("#"):
                lines.append(_labelled(line, answer.replica))
            elif first:
                lines.append(line)
    return "".join(line + "\n" for lines in groups.values() for line in lines).encode()


def _labelled(sample: str, replica: str) -> str:
    name, brace, rest = sample.partition("{")
    if brace:
        return f'{name}{{replica="{replica}",{rest}'
    name, _, value = sample.partition(" ")
    return f'{name}{{replica="{replica}"}} {value}'


def sum_loads(answers: Sequence[Fetched]) -> bytes:
    """``/load`` of all together."""
    return json.dumps(
        {"server_load": sum(json.loads(answer.body)["server_load"] for answer in answers)}
    ).encode()


GATHERED: dict[str, Merge] = {
    "/metrics": merge_metrics,
    "/load": sum_loads,
    "/reset_prefix_cache": lambda answers: answers[0].body,
    "/start_profile": lambda answers: answers[0].body,
    "/stop_profile": lambda answers: answers[0].body,
}
