"""Middleware in plain ASGI: request ids, logging and metrics, unforeseen errors, API keys.

Plain ASGI because a stream's every chunk passes here: no queues, no tasks, no copies.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import InvalidRequestError
from jaxserve.logs import FIELDS
from jaxserve.metrics.http_metrics import HTTPMetrics
from jaxserve.metrics.traces import client_trace, trace_headers
from jaxserve.server.errors import HTTPProblem, error_response, is_anthropic
from jaxserve.server.streaming import ClientDisconnected

logger = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-request-id"
ANTHROPIC_ID_HEADER = "request-id"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
QUIET_PATHS = frozenset({"/health", "/ping", "/metrics"})
"""Polled all the time: not logged."""
OPEN_PATHS = frozenset({"/health", "/ping"})
"""What an API key does not guard."""
CLIENT_CLOSED_REQUEST = 499
"""nginx's status for a client that left; it is only counted and logged."""
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RequestMiddleware:
    """Outermost: gives the request its id, counts and logs it, and answers 500 for what nobody foresaw."""

    def __init__(self, app: ASGIApp, metrics: HTTPMetrics, *, send_ids: bool = True) -> None:
        self._app = app
        self._metrics = metrics
        self._send_ids = send_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.perf_counter()
        exchange = _Exchange(scope, send, self._send_ids)
        try:
            exchange.check_request_id()
            await self._app(scope, receive, exchange.send)
        except ClientDisconnected:
            exchange.status = CLIENT_CLOSED_REQUEST
        except Exception as error:
            if not isinstance(error, InvalidRequestError):
                logger.exception("Request %s failed.", exchange.request_id)
            await exchange.fail(error, receive)
        finally:
            self._record(scope, exchange, time.perf_counter() - began)

    def _record(self, scope: Scope, exchange: _Exchange, seconds: float) -> None:
        status = exchange.status
        handler = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in METHODS else "OTHER"
        self._metrics.record(handler, method, status, seconds)
        if route_path(scope) not in QUIET_PATHS:
            # The path as it was sent: percent-encoded, so that it cannot break a log line.
            path = scope.get("raw_path", b"").decode("ascii", errors="replace")[:200]
            fields = {
                "method": method, "path": path, "status": status, "seconds": round(seconds, 6),
                "request_id": exchange.request_id, **(exchange.trace or {}),
            }  # fmt: skip
            logger.info("%s %s %d in %.3f s", method, path, status, seconds, extra={FIELDS: fields})


class _Exchange:
    """One request and what has been sent for it."""

    def __init__(self, scope: Scope, send: Send, send_id: bool) -> None:
        self._send_id = send_id
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID_HEADER)
        self._invalid = given is not None and _REQUEST_ID.fullmatch(given) is None
        self.request_id = uuid.uuid4().hex if given is None or self._invalid else given
        self.status = 500
        self._scope = scope
        self._send = send
        self._started = False
        scope.setdefault("state", {})["request_id"] = self.request_id
        # The trace that the client is in: the engine's spans go on with it. Each request has a context of its own.
        self.trace = trace_headers(headers)
        client_trace.set(self.trace)

    def check_request_id(self) -> None:
        if self._invalid:
            raise InvalidRequestError(
                "X-Request-Id must be 1 to 256 printable ASCII characters without spaces.",
                param="X-Request-Id",
            )

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            if self._send_id:
                headers[REQUEST_ID_HEADER] = self.request_id
            if is_anthropic(self._scope):
                headers[ANTHROPIC_ID_HEADER] = self.request_id
        await self._send(message)

    async def fail(self, error: Exception, receive: Receive) -> None:
        if self._started:
            # The head is out: all that is left is to break the connection off, which the server does for us.
            raise error
        await error_response(error, scope=self._scope)(self._scope, receive, self.send)


class APIKeyMiddleware:
    """Asks for ``Authorization: Bearer <key>``, or Anthropic's ``X-API-Key``, on every path but the health checks.

    Args:
        app: what is guarded.
        keys: any of them opens it.
        open_paths: further paths that need none.
    """

    def __init__(
        self, app: ASGIApp, keys: Sequence[str], *, open_paths: frozenset[str] = frozenset()
    ) -> None:
        self._app = app
        self._open_paths = OPEN_PATHS | open_paths
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._is_open(scope) or self._allows(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = HTTPProblem(401, "Missing or incorrect API key: send 'Authorization: Bearer <key>'.")
        await error_response(error, {"www-authenticate": "Bearer"}, scope=scope)(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        return route_path(scope) in self._open_paths

    def _allows(self, headers: Headers) -> bool:
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = [bearer.strip() if scheme.lower() == "bearer" else "", headers.get("x-api-key", "")]
        digests = [_digest(key.encode("latin-1")) for key in given if key]
        # Digests of one length, and no early end: the time says nothing about the keys.
        matches = [hmac.compare_digest(digest, known) for digest in digests for known in self._digests]
        return any(matches)


def route_path(scope: Scope) -> str:
    """The path below the one under which a proxy serves this server (``--root-path``)."""
    return scope["path"].removeprefix(scope.get("root_path", ""))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
