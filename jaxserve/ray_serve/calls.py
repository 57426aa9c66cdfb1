"""What crosses between the Ingress and a replica: an HTTP request, and the ASGI messages of its answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope

_SCOPE_KEYS = (
    "type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers",
    "client", "server",
)  # fmt: skip


@dataclass(frozen=True)
class HTTPCall:
    """One HTTP request, on its way to a replica.

    Args:
        scope: the ASGI scope's plain values.
        body: all of it, or a byte more than the application accepts.
        hashes: of its prompt, for the router.
        avoid: ids of replicas that have failed it already.
    """

    scope: Scope
    body: bytes
    hashes: tuple[bytes, ...] = ()
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Fetched:
    """One replica's whole answer."""

    replica: str
    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


class ReplicaFailed(Exception):
    """The engine of the replica named by the argument died before it had answered; another one can."""


def plain_scope(scope: Scope) -> Scope:
    """What of ``scope`` can travel."""
    return {key: scope[key] for key in _SCOPE_KEYS if key in scope}


async def answer(app: ASGIApp, call: HTTPCall) -> AsyncGenerator[list[Message]]:
    """Let ``app`` answer; its messages as they come, those at once that have come since the last were taken.

    Closing the generator early is the client's leaving: the application is told and cleans up.
    """
    messages: asyncio.Queue[Message | None] = asyncio.Queue()
    left = asyncio.Event()
    requested = False

    async def receive() -> Message:
        nonlocal requested
        if not requested:
            requested = True
            return {"type": "http.request", "body": call.body, "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        if not left.is_set():
            messages.put_nowait(message)

    async def run() -> None:
        try:
            await app(dict(call.scope), receive, send)
        finally:
            messages.put_nowait(None)

    task = asyncio.create_task(run())
    try:
        ended = False
        while not ended:
            taken = [await messages.get()]
            while not messages.empty():
                taken.append(messages.get_nowait())
            ended = taken[-1] is None
            if batch := [message for message in taken if message is not None]:
                yield batch
        await task  # an error of the application's is the caller's
    finally:
        left.set()
        if not task.done():
            # Not cancelled: it is to abort its requests, however this task is being cancelled itself.
            _LEAVING.add(task)
            task.add_done_callback(_forget)


_LEAVING: set[asyncio.Task[None]] = set()
"""Applications whose clients have left, until they have cleaned up: a task that nobody holds may vanish."""


def _forget(task: asyncio.Task[None]) -> None:
    _LEAVING.discard(task)
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()  # seen; the application has logged it


async def read_body(receive: Receive, limit: int) -> bytes:
    """A request's body, or a byte more than ``limit`` of it: then the application refuses it in its own words.

    Raises:
        ConnectionError: the client has left.
    """
    parts: list[bytes] = []
    size = 0
    while size <= limit:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("The client has left.")
        part: bytes = message.get("body", b"")
        parts.append(part)
        size += len(part)
        if not message.get("more_body", False):
            break
    return b"".join(parts)[: limit + 1]
