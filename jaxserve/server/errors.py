"""Errors in OpenAI's form: ``{"error": {"message", "type", "param", "code"}}``, ``code`` being the status.

On Anthropic's paths they take Anthropic's: ``{"type": "error", "error": {"type", "message"}, "request_id"}``.

A message never holds a path, a traceback or an address of the server.
"""

from __future__ import annotations

import http
import itertools
import logging
import re
import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from jaxserve.errors import (
    EngineDeadError,
    InvalidRequestError,
    JaxserveError,
    ModelNotFoundError,
    QueueFullError,
    RequestFailedError,
)

logger = logging.getLogger(__name__)

RETRY_AFTER_SECONDS = "1"
"""When a client that was refused because of a full queue should ask again."""
MAX_REPORTED = 10
"""Errors of one body that are spelt out."""
MAX_VALUE_CHARS = 200
MAX_MESSAGE_CHARS = 4000


class HTTPProblem(JaxserveError):
    """A mistake that HTTP itself has a status for (413, 401, …)."""

    def __init__(
        self, status: int, message: str, *, type: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.type = type or http.HTTPStatus(status).phrase
        self.param = param


class ErrorInfo(msgspec.Struct):
    """The inside of an error body."""

    message: str
    type: str
    param: str | None
    code: int


class ErrorBody(msgspec.Struct):
    """An error body, also sent as the last event of a stream that broke."""

    error: ErrorInfo


class AnthropicErrorInfo(msgspec.Struct):
    """The inside of an error body in Anthropic's form."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, tag="error"):
    """An error body in Anthropic's form, also sent as the last event of a stream that broke."""

    error: AnthropicErrorInfo
    request_id: str


def error_info(error: BaseException) -> ErrorInfo:
    """What the client is told about ``error``."""
    match error:
        case InvalidRequestError():
            return ErrorInfo(_short(error.message), "BadRequestError", error.param, 400)
        case HTTPProblem():
            return ErrorInfo(_short(str(error)), error.type, error.param, error.status)
        case ModelNotFoundError():
            return ErrorInfo(_short(str(error)), "NotFoundError", "model", 404)
        case QueueFullError() | EngineDeadError():
            return ErrorInfo(without_internals(str(error)), "Service Unavailable", None, 503)
        case RequestFailedError():
            return ErrorInfo(without_internals(str(error)), "InternalServerError", None, 500)
        case RequestValidationError():
            return _validation_info(error)
        case HTTPException():
            phrase = http.HTTPStatus(error.status_code).phrase
            return ErrorInfo(_short(str(error.detail)), phrase, None, error.status_code)
        case _:
            return ErrorInfo("The server failed to answer this request.", "InternalServerError", None, 500)


def error_response(
    error: BaseException, headers: Mapping[str, str] | None = None, *, scope: Scope | None = None
) -> Response:
    """The response to a request that ended in ``error`` before anything was sent.

    Args:
        error: why.
        headers: further headers.
        scope: of the request: its path decides about the form, which is OpenAI's without one.
    """
    info = error_info(error)
    body: msgspec.Struct = ErrorBody(info)
    if scope is not None and is_anthropic(scope):
        body = anthropic_error(error, scope["state"]["request_id"])
    if isinstance(error, QueueFullError):
        headers = {"retry-after": RETRY_AFTER_SECONDS, **(headers or {})}
    return Response(msgspec.json.encode(body), info.code, headers=headers, media_type="application/json")


def is_anthropic(scope: Scope) -> bool:
    """Whether the request speaks Anthropic's protocol."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path == "/v1/messages" or path.startswith("/v1/messages/")


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(error: BaseException, request_id: str) -> AnthropicErrorBody:
    """``error`` in Anthropic's form."""
    info = error_info(error)
    fallback = "invalid_request_error" if info.code < 500 else "api_error"
    inside = AnthropicErrorInfo(_ANTHROPIC_TYPES.get(info.code, fallback), info.message)
    return AnthropicErrorBody(inside, request_id)


def install_error_handlers(app: FastAPI) -> None:
    """Render every error of the routes; anything unforeseen is left to the outermost middleware."""

    async def handle(request: Request, error: Exception) -> Response:
        headers = getattr(error, "headers", None)
        return error_response(error, headers, scope=request.scope)

    for kind in (JaxserveError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, handle)


_TRACEBACK = re.compile(r"\s*Traceback \(most recent call last\).*", re.DOTALL)
_FILE_LINE = re.compile(r'File "[^"]*", line \d+(, in \S+)?')
_PATH = re.compile(r"(?<![\w:/])(?:~|[A-Za-z]:)?(?:[/\\][\w.+@-]+){2,}[/\\]?")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{4,}\b")


def without_internals(message: str) -> str:
    """``message`` without tracebacks, file paths and memory addresses."""
    message = _TRACEBACK.sub("", message)
    for pattern in (_FILE_LINE, _PATH, _ADDRESS):
        message = pattern.sub("…", message)
    return _short(message.strip() or "The server failed to answer this request.")


def _short(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "…"


def _validation_info(error: RequestValidationError) -> ErrorInfo:
    details: list[dict[str, Any]] = list(error.errors())
    for detail in details:
        cause = detail.get("ctx", {}).get("error")
        if isinstance(cause, InvalidRequestError):
            return error_info(cause)
    reasons: dict[str, list[str]] = {}
    for detail in details:
        reasons.setdefault(_path(detail["loc"]), []).append(_describe(detail))
    lines = [f"  {path}: {', or '.join(texts)}" for path, texts in reasons.items()]
    if len(lines) > MAX_REPORTED:
        lines[MAX_REPORTED:] = [f"  and {len(lines) - MAX_REPORTED} more"]
    head = f"{len(reasons)} validation error{'s' if len(reasons) > 1 else ''}:"
    return ErrorInfo(_short("\n".join([head, *lines])), "Bad Request", next(iter(reasons), None), 400)


_UNION_MEMBERS = frozenset({"str", "int", "float", "bool", "none", "constrained-str", "constrained-int"})


def _path(loc: tuple[int | str, ...]) -> str:
    """``body.messages.0.role``, without the names that pydantic gives to the members of unions."""
    return ".".join(str(part) for part in loc if isinstance(part, int) or _is_field(part))


def _is_field(part: str) -> bool:
    return part not in _UNION_MEMBERS and re.fullmatch(r"[\w.-]+", part) is not None


class _ShortRepr(reprlib.Repr):
    """``repr`` of the beginning of a value, which may be megabytes."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 2 * MAX_VALUE_CHARS
        self.maxlist = self.maxdict = 20

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        items = itertools.islice(
            x.items(), self.maxdict if level > 0 else 0
        )  # in their order: sorting takes time
        parts = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in items]
        return "{" + ", ".join(parts) + (", …" if len(x) > len(parts) else "") + "}"


_short_repr = _ShortRepr().repr


def _describe(detail: dict[str, Any]) -> str:
    value = _short_repr(detail.get("input"))
    if detail["type"] == "missing":
        return "this field is required"
    if len(value) > MAX_VALUE_CHARS:
        value = value[:MAX_VALUE_CHARS] + "…"
    return f"{detail['msg']} (got {value})"
