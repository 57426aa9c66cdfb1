"""The OpenAPI document: what FastAPI derives from requests, with what this server really answers.

FastAPI knows neither the answers (they are msgspec structs) nor the errors, and promises 422s that never come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import FastAPI

from jaxserve.sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_STRINGS
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
    ("post", "/start_profile"): Answer(),
    ("post", "/stop_profile"): Answer(),
    ("post", "/reset_prefix_cache"): Answer(),
}
"""Paths whose answer is described; others answer with some JSON."""


LIMITS: Mapping[str, Mapping[str, Any]] = {
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "n": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "logprobs": {"minimum": -1},
    "prompt_logprobs": {"minimum": -1},
    "truncate_prompt_tokens": {"minimum": -1},
    "allowed_token_ids": {"minItems": 1, "items": {"type": "integer", "minimum": 0}},
    "stop_token_ids": {"items": {"type": "integer", "minimum": 0}},
    "logit_bias": {"propertyNames": {"pattern": "^[0-9]{1,18}$"}, "maxProperties": MAX_LOGIT_BIAS},
    "bad_words": {"maxItems": MAX_BAD_WORDS, "items": {"type": "string", "minLength": 1}},
    "messages": {"minItems": 1},
    "input": {"minItems": 1},
    "prompt": {"minItems": 1, "minLength": 1},
    "token_ids": {"minItems": 1},
    "stop": {"minLength": 1, "maxItems": MAX_STOP_STRINGS, "items": {"type": "string", "minLength": 1}},
}
"""What SamplingParams checks itself, for the document alone. Where a field may be of several types, each takes
what concerns it."""
_CONCERNS = {
    "number": ("minimum", "maximum", "exclusiveMinimum"),
    "integer": ("minimum", "maximum", "exclusiveMinimum"),
    "string": ("minLength",),
    "array": ("minItems", "maxItems", "items"),
    "object": ("propertyNames", "maxProperties"),
}


def install_openapi(app: FastAPI, model_names: Sequence[str]) -> None:
    """Let ``app`` describe itself correctly, at ``/openapi.json`` and ``/docs``.

    Args:
        app: with all its routes.
        model_names: the models that requests may name.
    """
    derive: Callable[[], dict[str, Any]] = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(derive(), model_names)
        return app.openapi_schema

    app.openapi = openapi


def _complete(document: dict[str, Any], model_names: Sequence[str]) -> dict[str, Any]:
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
    for schema in declared.values():
        if schema.get("type") == "object":
            schema.setdefault("additionalProperties", False)
        _limit(schema.get("properties", {}), model_names)
    declared.update({f"Answer.{name}": schema for name, schema in components.items()})
    return document


def _limit(properties: dict[str, Any], model_names: Sequence[str]) -> None:
    """Say which values of a request's fields are allowed."""
    if "model" in properties:
        properties["model"]["anyOf"][0]["enum"] = list(model_names)
    for name in LIMITS.keys() & properties.keys():
        for alternative in properties[name].get("anyOf", [properties[name]]):
            for keyword in _CONCERNS.get(alternative.get("type"), ()):
                if keyword in LIMITS[name]:
                    alternative[keyword] = LIMITS[name][keyword]


def _describe(operation: dict[str, Any], method: str, path: str, schemas: Mapping[type, Any]) -> None:
    answer = ANSWERS.get((method, path))
    content: dict[str, Any] = {JSON: {"schema": {}}} if answer is None else {}
    if answer is not None and answer.body is not None:
        content[JSON] = {"schema": schemas[answer.body]}
    if answer is not None and answer.streams:
        content[EVENTS] = {"schema": {}}  # of one event; its data is JSON
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
