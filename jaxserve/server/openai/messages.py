"""Chat messages: checked here, field by field, so that a template only sees what it can render."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, cast

from pydantic import BaseModel

from jaxserve.errors import InvalidRequestError, UnsupportedError

ROLES = ("system", "developer", "user", "assistant", "tool")
UNSUPPORTED_ROLES = ("function",)
FIELDS = ("role", "content", "name", "reasoning", "reasoning_content")
FIELDS_OF_ROLE = {"assistant": ("tool_calls",), "tool": ("tool_call_id",)}
"""Fields that only messages of a role have."""
UNSUPPORTED_FIELDS = ("function_call", "audio", "annotations", "refusal")
TEXT_PARTS = ("text", "input_text", "output_text")
MAX_MESSAGES = 65536


class TextPart(BaseModel):
    """A part of a message's content, for the API's schema. Only text is supported."""

    type: Literal["text"]
    text: str


class CalledFunction(BaseModel):
    """A called function; ``arguments`` is the text of a JSON object."""

    name: str
    arguments: str


class MessageToolCall(BaseModel):
    """A call that an assistant's message made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(BaseModel):
    """One message, for the API's schema."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None


def check_messages(value: Any) -> list[dict[str, Any]]:
    """The messages with null fields left out; what a template does with them is the template's affair.

    Raises:
        InvalidRequestError: with the field's path, such as ``messages[0].content``.
    """
    if not isinstance(value, list):
        raise InvalidRequestError("messages must be a list.", param="messages")
    messages = cast("list[Any]", value)
    if not messages:
        raise InvalidRequestError("messages is empty; send at least one message.", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages holds {len(messages)}; at most {MAX_MESSAGES} are allowed.", param="messages"
        )
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidRequestError(f"{path} must be an object with role and content.", param=path)
    given = cast("dict[str, Any]", message)
    # Clients send an answer back as they got it, with nulls and empty lists for what it did not have.
    fields = {name: value for name, value in given.items() if value is not None and value != []}
    for name in fields:
        if name in UNSUPPORTED_FIELDS:
            raise UnsupportedError(
                f"{path}.{name} is not supported by this server; remove it.", param=f"{path}.{name}"
            )
        if name not in FIELDS and not any(name in names for names in FIELDS_OF_ROLE.values()):
            raise InvalidRequestError(f"Unknown field {path}.{name[:100]}.", param=f"{path}.{name[:100]}")
    role = _check_role(fields.get("role"), path)
    for name in fields:
        if name not in FIELDS and name not in FIELDS_OF_ROLE.get(role, ()):
            raise InvalidRequestError(
                f"{path}.{name} has no place in a message of the role {role!r}.", param=f"{path}.{name}"
            )
    if "content" in fields:
        _check_content(fields["content"], f"{path}.content")
    elif role == "assistant":
        fields["content"] = ""
    else:
        raise InvalidRequestError(f"{path}.content is missing.", param=f"{path}.content")
    if "tool_calls" in fields:
        fields["tool_calls"] = _check_calls(fields["tool_calls"], f"{path}.tool_calls")
    for name in ("name", "reasoning", "reasoning_content", "tool_call_id"):
        if not isinstance(fields.get(name, ""), str):
            raise InvalidRequestError(f"{path}.{name} must be a string.", param=f"{path}.{name}")
    return fields


def _check_role(role: Any, path: str) -> str:
    if role in UNSUPPORTED_ROLES:
        raise UnsupportedError(f"{path}.role {role!r} is not supported by this server.", param=f"{path}.role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(
            f"{path}.role must be one of {', '.join(ROLES)}, got {repr(role)[:100]}.", param=f"{path}.role"
        )
    return role


def _check_content(content: Any, path: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidRequestError(f"{path} must be a string or a list of text parts.", param=path)
    for index, part in enumerate(cast("list[Any]", content)):
        _check_part(part, f"{path}[{index}]")


def _check_part(part: Any, path: str) -> None:
    if not isinstance(part, dict):
        raise InvalidRequestError(
            f"{path} must be an object such as {{'type': 'text', 'text': '…'}}.", param=path
        )
    fields = cast("dict[str, Any]", part)
    kind = fields.get("type")
    if kind not in TEXT_PARTS:
        raise UnsupportedError(
            f"{path}.type {repr(kind)[:100]} is not supported: this model takes text only.",
            param=f"{path}.type",
        )
    if not isinstance(fields.get("text"), str):
        raise InvalidRequestError(f"{path}.text must be a string.", param=f"{path}.text")


def _check_calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{path} must be a list.", param=path)
    return [_check_call(call, f"{path}[{index}]") for index, call in enumerate(cast("list[Any]", calls))]


def _check_call(call: Any, path: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise InvalidRequestError(f"{path} must be an object with id and function.", param=path)
    # Streaming clients keep each call's index; it says nothing that the order does not.
    fields = {k: v for k, v in cast("dict[str, Any]", call).items() if v is not None and k != "index"}
    if fields.get("type", "function") != "function":
        raise UnsupportedError(
            f"{path}.type {repr(fields['type'])[:100]} is not supported: only functions are.",
            param=f"{path}.type",
        )
    if not isinstance(fields.get("id", ""), str):
        raise InvalidRequestError(f"{path}.id must be a string.", param=f"{path}.id")
    path = f"{path}.function"
    function = fields.get("function")
    if not isinstance(function, dict):
        raise InvalidRequestError(f"{path} must be an object with name and arguments.", param=path)
    called = cast("dict[str, Any]", function)
    if not isinstance(called.get("name"), str) or not called["name"]:
        raise InvalidRequestError(f"{path}.name must be a string.", param=f"{path}.name")
    arguments = called.get("arguments") or "{}"
    if isinstance(arguments, dict):  # as templates spell it
        arguments = json.dumps(arguments, ensure_ascii=False)
    _check_arguments(arguments, f"{path}.arguments")
    return {**fields, "type": "function", "function": {"name": called["name"], "arguments": arguments}}


def _check_arguments(arguments: Any, path: str) -> None:
    try:
        value: Any = json.loads(arguments) if isinstance(arguments, str) else None
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{path} is not valid JSON: {error}", param=path) from None
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path} must be the text of a JSON object.", param=path)


def text_of(message: Mapping[str, Any]) -> str:
    """A checked message's content as one text."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
