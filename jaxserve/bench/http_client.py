"""A small HTTP/1.1 client for measuring: bytes are handed on as they arrive, with the time of their arrival.

Times are taken in the transport's callback, before anything waits for its turn in the event loop, so that they stay
right while hundreds of streams share a core.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from jaxserve.errors import ConfigError, JaxserveError
from jaxserve.version import __version__

OnData = Callable[[float, bytes], None]
"""Gets ``time.perf_counter()`` and a piece of the body."""
CONNECT_SECONDS = 60.0


class ServerUnreachableError(JaxserveError):
    """Nobody answers at the address, or the connection broke."""


@dataclass
class Response:
    """An answer's head, and its body unless that was handed on piece by piece."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""

    @property
    def has_length(self) -> bool:
        """Whether the head says where the body ends; else it ends with the connection."""
        return "content-length" in self.headers or "transfer-encoding" in self.headers


class HTTPClient:
    """Requests to one server, over connections that are kept. One event loop uses it.

    Args:
        base_url: ``http://`` or ``https://``, host, port, and perhaps a path that goes before every other.
        headers: sent with every request.
        verify: check the certificate of an ``https`` server.

    Raises:
        ConfigError: ``base_url`` is no such address.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str], *, verify: bool = True) -> None:
        parts = urlsplit(base_url.rstrip("/"))
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigError(
                f"base_url is {base_url!r}; it must be an address such as http://127.0.0.1:8000.",
                param="base_url",
            )
        self.base_url = base_url.rstrip("/")
        self._host, self._path = parts.hostname, parts.path
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = _tls_context(verify) if parts.scheme == "https" else None
        sent = {
            "host": parts.netloc.rpartition("@")[2],
            "user-agent": f"jaxserve-bench/{__version__}",
            **headers,
        }
        self._head = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
        if not self._head.isprintable() and any(c in value for value in sent.values() for c in "\r\n"):
            raise ConfigError("A header may not hold a line break.", param="header")
        self._idle: list[_Connection] = []

    async def request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        *,
        headers: Mapping[str, str] | None = None,
        on_data: OnData | None = None,
    ) -> Response:
        """Send a request and wait for the end of its answer.

        Args:
            method, path, body: what is sent; a body is JSON.
            headers: further ones.
            on_data: gets the body of a 200 as it arrives; without it, and of another status, it is in the response.

        Raises:
            ServerUnreachableError: no connection, or it broke.
        """
        extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        if body:
            extra += "content-type: application/json\r\n"
        if body or method == "POST":
            extra += f"content-length: {len(body)}\r\n"
        data = f"{method} {self._path}{path} HTTP/1.1\r\n{self._head}{extra}\r\n".encode() + body
        while True:
            connection, is_new = await self._connection()
            try:
                response = await connection.exchange(data, on_data)
            except _Stale:
                if is_new:
                    raise ServerUnreachableError(
                        f"{self.base_url} closed the connection without an answer."
                    ) from None
                continue  # the server had closed a connection that was kept: nothing of this was read
            if connection.reusable:
                self._idle.append(connection)
            else:
                connection.close()
            return response

    def close(self) -> None:
        """Close the connections that are kept."""
        while self._idle:
            self._idle.pop().close()

    async def _connection(self) -> tuple[_Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection, False
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self.base_url), self._host, self._port, ssl=self._tls
                )
        except (OSError, TimeoutError) as error:
            reason = str(error) or "no answer in time"
            raise ServerUnreachableError(f"No server answers at {self.base_url}: {reason}.") from None
        return connection, True


def _tls_context(verify: bool) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class _Stale(Exception):
    """The connection was closed before the answer's first byte."""


class _Connection(asyncio.Protocol):
    """One connection, and the exchange that runs on it."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[Response] | None = None
        self._on_data: OnData | None = None
        self._response = Response()
        self._parser: httptools.HttpResponseParser | None = None
        self._now = 0.0
        self._pieces: list[bytes] = []
        self._began = False
        self.reusable = False
        """Whether another exchange may follow."""
        self.closed = False

    async def exchange(self, data: bytes, on_data: OnData | None) -> Response:
        """Send ``data``; the answer. Cancelled, it closes the connection: the server sees that and stops."""
        assert self._transport is not None
        self._done = asyncio.get_running_loop().create_future()
        self._on_data = on_data
        self._response, self._pieces = Response(), []
        self._began = self.reusable = False
        self._parser = httptools.HttpResponseParser(self)
        if self.closed:
            raise _Stale
        self._transport.write(data)
        try:
            return await self._done
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    # --- the transport's callbacks --------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none of asyncio's classes

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._parser is None or self._done is None or self._done.done():
            self.close()  # nobody asked for this
            return
        self._began = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(ServerUnreachableError(f"{self._base_url} does not speak HTTP/1.1: {error}"))
            self.close()
        except Exception as error:  # of on_data: it ends this exchange
            self._fail(error)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._done is None or self._done.done():
            return
        if not self._began:
            self._fail(_Stale())
        elif self._response.status and not self._response.has_length and exc is None:
            self._end()  # a body without a length ends with its connection
        else:
            self._fail(ServerUnreachableError(f"{self._base_url} closed the connection within an answer."))

    # --- the parser's callbacks -----------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._response.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._response.status = self._parser.get_status_code()
        if self._response.status != 200:
            self._on_data = None

    def on_body(self, body: bytes) -> None:
        if self._on_data is not None:
            self._on_data(self._now, body)
        else:
            self._pieces.append(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._response.status < 200:
            return
        self.reusable = self._parser.should_keep_alive()
        self._end()

    def _end(self) -> None:
        self._response.body = b"".join(self._pieces)
        if self._done is not None and not self._done.done():
            self._done.set_result(self._response)

    def _fail(self, error: Exception) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)
