"""The OpenAPI document: what FastAPI derives from requests, with what this server really answers.

FastAPI knows neither the answers (they are msgspec structs) nor the errors, and promises 422s that never come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI

from jaxserve.server.anthropic.objects import Message, TokenCount
from jaxserve.server.errors import AnthropicErrorBody, ErrorBody, is_anthropic
from jaxserve.server.openai.generate import GenerateBody
from jaxserve.server.openai.responses import (
    ChatCompletion,
    CompletionBody,
    DetokenizeBody,
    ModelCard,
    ModelList,
    TokenizeBody,
)
from jaxserve.server.openai.responses_api.objects import DeletedResponse, ItemList, Response

COMPONENTS = "#/components/schemas/"
METHODS = ("get", "post", "delete")
EVENTS = "text/event-stream"
JSON = "application/json"
PROBLEMS = {
    "400": "The request's own mistake; the message names it.",
    "401": "The API key is missing or wrong.",
    "404": "There is no such model or object.",
    "413": "The body is too large.",
    "500": "The engine failed.",
    "503": "Too many requests wait, or the engine has stopped.",
}
"""Statuses of errors; a request without a body or key meets fewer."""


@dataclass(frozen=True)
class Answer:
    """What a path answers with 200.

    Args:
        body: the type of the JSON; None is no JSON.
        streams: whether it may be a stream of events instead.
        media_type: of an answer that is not JSON.
    """

    body: type[msgspec.Struct] | None = None
    streams: bool = False
    media_type: str | None = None


ANSWERS: Mapping[tuple[str, str], Answer] = {
    ("post", "/v1/chat/completions"): Answer(ChatCompletion, streams=True),
    ("post", "/v1/chat/completions/batch"): Answer(ChatCompletion),
    ("post", "/v1/completions"): Answer(CompletionBody, streams=True),
    ("post", "/v1/responses"): Answer(Response, streams=True),
    ("get", "/v1/responses/{response_id}"): Answer(Response, streams=True),
    ("delete", "/v1/responses/{response_id}"): Answer(DeletedResponse),
    ("post", "/v1/responses/{response_id}/cancel"): Answer(Response),
    ("get", "/v1/responses/{response_id}/input_items"): Answer(ItemList),
    ("post", "/v1/messages"): Answer(Message, streams=True),
    ("post", "/v1/messages/count_tokens"): Answer(TokenCount),
    ("get", "/v1/models"): Answer(ModelList),
    ("get", "/v1/models/{name}"): Answer(ModelCard),
    ("post", "/tokenize"): Answer(TokenizeBody),
    ("post", "/detokenize"): Answer(DetokenizeBody),
    ("post", "/inference/v1/generate"): Answer(GenerateBody, streams=True),
    ("get", "/metrics"): Answer(media_type="text/plain"),
    ("get", "/health"): Answer(),
    ("get", "/ping"): Answer(),
    ("post", "/ping"): Answer(),
    ("post", "/reset_prefix_cache"): Answer(),
}
"""Paths whose answer is described; others answer with some JSON."""


def install_openapi(app: FastAPI) -> None:
    """Let ``app`` describe itself correctly, at ``/openapi.json`` and ``/docs``."""
    derive: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(derive())
        return app.openapi_schema

    app.openapi = openapi


def _complete(document: dict[str, Any]) -> dict[str, Any]:
    structs = {answer.body for answer in ANSWERS.values() if answer.body is not None}
    types = sorted({*structs, ErrorBody, AnthropicErrorBody}, key=lambda struct: struct.__name__)
    references, components = msgspec.json.schema_components(
        types, ref_template=f"{COMPONENTS}Answer.{{name}}"
    )
    schemas = dict(zip(types, references))
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            if method in METHODS:
                _describe(operation, method, path, schemas)
    declared: dict[str, Any] = document.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        declared.pop(name, None)
    declared.update({f"Answer.{name}": schema for name, schema in components.items()})
    return document


def _describe(operation: dict[str, Any], method: str, path: str, schemas: Mapping[type, Any]) -> None:
    answer = ANSWERS.get((method, path))
    content: dict[str, Any] = {JSON: {"schema": {}}} if answer is None else {}
    if answer is not None and answer.body is not None:
        content[JSON] = {"schema": schemas[answer.body]}
    if answer is not None and answer.streams:
        content[EVENTS] = {"schema": {"type": "string"}}
    if answer is not None and answer.media_type is not None:
        content[answer.media_type] = {"schema": {"type": "string"}}
    success: dict[str, Any] = {"description": "The answer."}
    if content:
        success["content"] = content
    error = schemas[AnthropicErrorBody if is_anthropic({"path": path}) else ErrorBody]
    failures = {
        status: {"description": text, "content": {JSON: {"schema": error}}}
        for status, text in PROBLEMS.items()
    }
    operation["responses"] = {"200": success, **failures}
