"""Request bodies: read within a size limit, decoded strictly, and refused with a clear 400 or 413.

Strictly: no NaN or infinity, valid UTF-8, no deeper than MAX_DEPTH.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable
from typing import Any, cast

import msgspec
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import HTTPProblem

MAX_PATH_CHARS = 200
MAX_DEPTH = 64
"""Arrays and objects inside each other."""


class JSONRequest(Request):
    """A request whose body was read and decoded already."""

    _decoded: Any = None

    async def json(self) -> Any:
        return self._decoded

    async def load(self) -> None:
        """Read and decode the body.

        Raises:
            InvalidRequestError: not JSON, not declared as JSON, or nested too deeply.
            HTTPProblem: larger than the application allows (413).
        """
        media_type = self.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json" and not media_type.endswith("+json"):
            raise InvalidRequestError("Unsupported Media Type: Only 'application/json' is allowed")
        self._body = await self._read(self.app.state.max_body_bytes)
        self._decoded = decode_json(self._body)

    async def _read(self, limit: int) -> bytes:
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > limit:
            raise _too_large(limit)
        parts: list[bytes] = []
        size = 0
        async for part in self.stream():
            size += len(part)
            if size > limit:
                raise _too_large(limit)
            parts.append(part)
        return b"".join(parts)


class JSONRoute(APIRoute):
    """A route whose body goes through JSONRequest."""

    def get_route_handler(self) -> Callable[[Request], Any]:
        handler: Callable[[Request], Awaitable[Response]] = super().get_route_handler()
        if self.body_field is None:
            return handler

        async def handle(request: Request) -> Response:
            json_request = JSONRequest(request.scope, request.receive)
            try:
                await json_request.load()
            except ClientDisconnect:
                return Response(status_code=400)  # nobody is left to read it
            return await handler(json_request)

        return handle


def decode_json(body: bytes) -> Any:
    """Decode ``body``.

    Raises:
        InvalidRequestError: it is empty, malformed, or nested deeper than MAX_DEPTH.
    """
    if not body:
        raise InvalidRequestError("The request has no body; send a JSON object.")
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(
            f"The body is not valid JSON: {error}", param=_unreadable_number(body)
        ) from None
    # Counting brackets is quick and rules out most bodies, a long list of token ids among them.
    if body.count(b"[") + body.count(b"{") > MAX_DEPTH:
        _check_depth(value)
    return value


class _Unreadable:
    """Stands for a number that JSON allows but that no float or 64-bit integer holds."""


def _unreadable_number(body: bytes) -> str | None:
    """The path of the first number that is out of range, or no number (NaN, Infinity); None without one."""

    def read_float(text: str) -> object:
        return 0.0 if math.isfinite(float(text)) else _Unreadable()

    def read_int(text: str) -> object:
        return 0 if len(text) < 19 or (len(text) < 400 and _fits(int(text))) else _Unreadable()

    try:
        value = json.loads(
            body, parse_float=read_float, parse_int=read_int, parse_constant=lambda _: _Unreadable()
        )
    except (ValueError, RecursionError):
        return None
    return _path_of_unreadable(value)


def _fits(number: int) -> bool:
    return -(2**63) <= number < 2**64


def _path_of_unreadable(value: Any) -> str | None:
    stack: list[tuple[str, Any]] = [("", value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, _Unreadable):
            return path[:MAX_PATH_CHARS] or None
        if isinstance(item, dict):
            children = list(cast("dict[str, Any]", item).items())
            stack += [(f"{path}.{name}" if path else name, child) for name, child in reversed(children)]
        elif isinstance(item, list):
            numbered = list(enumerate(cast("list[Any]", item)))
            stack += [(f"{path}[{index}]", child) for index, child in reversed(numbered)]
    return None


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for container in level for child in _containers(container)]
        if not level:
            return
    raise _too_deep()


def _containers(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if isinstance(value, list):
        return [child for child in cast("list[Any]", value) if isinstance(child, (dict, list))]
    return []


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError(f"The body is nested deeper than {MAX_DEPTH} levels.")


def _too_large(limit: int) -> HTTPProblem:
    return HTTPProblem(413, f"The body is larger than {limit} bytes, the most this server accepts.")
