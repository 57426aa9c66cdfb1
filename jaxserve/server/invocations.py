"""POST /invocations, SageMaker's one path: the body's shape says which endpoint is meant."""

from __future__ import annotations

from typing import Any, cast

from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import InvalidRequestError
from jaxserve.server.json_body import JSONRequest

SHAPES = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "token_ids": "/inference/v1/generate",
}
"""A field that only one endpoint has, and that endpoint."""


def invocation_routes(app: ASGIApp) -> APIRouter:
    """Routes that hand requests on within ``app``, the router with the other endpoints."""
    router = APIRouter()

    async def invoke(request: Request) -> Response:
        """A chat completion (``messages``), a completion (``prompt``) or a generation (``token_ids``)."""
        body = JSONRequest(request.scope, request.receive)
        try:
            await body.load()
        except ClientDisconnect:
            return Response(status_code=400)  # nobody is left to read it
        return _Forwarded(app, _endpoint(await body.json()), await body.body())

    router.add_api_route("/invocations", invoke, methods=["POST"])
    return router


def _endpoint(body: Any) -> str:
    if isinstance(body, dict):
        for name, path in SHAPES.items():
            if name in cast("dict[str, Any]", body):
                return path
    raise InvalidRequestError(f"The body must be an object with one of {', '.join(SHAPES)}.")


class _Forwarded(Response):
    """Another route's answer to the same request, whose body was read already."""

    def __init__(self, app: ASGIApp, path: str, body: bytes) -> None:
        super().__init__()
        self._app = app
        self._path = path
        self._sent_body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("root_path", "") + self._path
        inner = {**scope, "path": path, "raw_path": path.encode()}
        unread = [self._sent_body]

        async def replay() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await receive()

        await self._app(inner, replay, send)
        scope["route"] = inner.get("route")  # metrics count the endpoint that answered
