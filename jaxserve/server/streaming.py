"""Server-sent events, and noticing that a client has left.

Cost per event matters here (it is paid for every token of every stream): one encode and one send, no wrapping
models, no per-event tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from jaxserve.errors import JaxserveError
from jaxserve.server.errors import ErrorBody, error_info

logger = logging.getLogger(__name__)

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"
STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
"""Neither caches nor nginx may hold events back."""

_encode = msgspec.json.Encoder().encode


class ClientDisconnected(Exception):
    """The client left before its answer was complete; there is nobody to tell."""


def event(message: msgspec.Struct) -> bytes:
    """``message`` as one server-sent event."""
    return b"data: " + _encode(message) + b"\n\n"


class EventStream(Response):
    """A response that sends events as they come and cleans up when they end or the client leaves.

    Args:
        events: ready-made bytes, of one or more events each.
        cleanup: called once, whatever happens; it must be safe to call after a complete stream.
        render_error: the event for a failure after the stream began (the status is 200 by then).
        end: the last event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[bytes],
        cleanup: Callable[[], Awaitable[None]],
        *,
        render_error: Callable[[Exception], bytes] | None = None,
        end: bytes = DONE,
    ) -> None:
        super().__init__(None, headers=STREAM_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._cleanup = cleanup
        self._render_error = render_error or error_event
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            with contextlib.suppress(ClientDisconnected):
                await run_while_connected(receive, self._write(send, _keep_alive_interval(scope)))
        finally:
            await self._cleanup()

    async def _write(self, send: Send, keep_alive_interval: float) -> None:
        last = self._end
        events = self._events
        if keep_alive_interval > 0:
            events = _with_comments(events, keep_alive_interval)
        try:
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            if not isinstance(error, JaxserveError):
                logger.exception("A stream failed.")
            last = self._render_error(error) + self._end
        await send({"type": "http.response.body", "body": last, "more_body": False})


def _keep_alive_interval(scope: Scope) -> float:
    app = scope.get("app")
    return 0.0 if app is None else getattr(app.state, "sse_keep_alive_interval", 0.0)


async def _with_comments(events: AsyncIterator[bytes], interval: float) -> AsyncIterator[bytes]:
    """``events``, with a comment whenever none came for ``interval`` seconds. Readers skip comments."""
    pending: asyncio.Task[bytes] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(_next(events))
            done, _ = await asyncio.wait({pending}, timeout=interval)
            if not done:
                yield KEEP_ALIVE
                continue
            finished, pending = pending, None
            try:
                yield finished.result()
            except StopAsyncIteration:
                return
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.gather(pending, return_exceptions=True)


async def _next(events: AsyncIterator[bytes]) -> bytes:
    return await anext(events)


def error_event(error: Exception) -> bytes:
    """``error`` in OpenAI's form, as an event."""
    return event(ErrorBody(error_info(error)))


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client leaves.

    The request's body must have been read: then the only message still to come is the disconnect.

    Raises:
        ClientDisconnected: the client left first.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnected
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
