"""Anthropic's messages and content blocks, checked field by field and turned into chat messages.

A user message may hold results of tools and text: the results become messages of their own, in the order given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

import msgspec
from pydantic import BaseModel, Field

from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.server.field_names import AsksNothing, choice_field, known_fields, neutral, text_field

MAX_MESSAGES = 100_000
"""Anthropic's."""
ROLES = ("user", "assistant", "system")


def _anything(_value: Any) -> bool:
    return True


HINTS: dict[str, AsksNothing] = {"cache_control": _anything}
"""Where to cache: every prefix is cached here, so that hint changes nothing."""


# --- for the API's schema ----------------------------------------------------------------------------------


class TextBlock(BaseModel):
    """A text."""

    type: Literal["text"]
    text: str


class ToolUseBlock(BaseModel):
    """A call that the model made."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(BaseModel):
    """What the call returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None


class ThinkingBlock(BaseModel):
    """What the model thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class UserMessage(BaseModel):
    """What the user says, and what tools returned."""

    role: Literal["user"]
    content: str | list[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]]


class AssistantMessage(BaseModel):
    """What the model said, thought and called."""

    role: Literal["assistant"]
    content: str | list[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]]


Message = Annotated[UserMessage | AssistantMessage, Field(discriminator="role")]


# --- checking ----------------------------------------------------------------------------------------------


def parse_system(value: Any) -> str:
    """The system prompt: a text, or text blocks.

    Raises:
        InvalidRequestError: with the field's path.
    """
    return value if isinstance(value, str) else _texts(value, "system")


def parse_messages(value: Any) -> list[dict[str, Any]]:
    """The messages in the form of OpenAI's chat.

    Raises:
        InvalidRequestError: with the field's path, such as ``messages[0].content[1].text``.
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
    result: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        result += _message(message, f"messages[{index}]")
    return result


def _message(message: Any, path: str) -> list[dict[str, Any]]:
    fields = known_fields(message, path, ("role", "content"))
    role = choice_field(fields, "role", path, ROLES)
    content = fields.get("content")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        problem = "is missing" if content is None else "must be a string or a list of blocks"
        raise InvalidRequestError(f"{path}.content {problem}.", param=f"{path}.content")
    blocks = [(f"{path}.content[{index}]", block) for index, block in enumerate(cast("list[Any]", content))]
    match role:
        case "assistant":
            return [_assistant(blocks)]
        case "user":
            return _user(blocks)
        case _:
            return [{"role": role, "content": _texts(cast("list[Any]", content), f"{path}.content")}]


def _assistant(blocks: list[tuple[str, Any]]) -> dict[str, Any]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for path, block in blocks:
        match _kind(block, path, ("text", "tool_use", "thinking")):
            case "text":
                texts.append(_text(block, path))
            case "thinking":
                fields = known_fields(block, path, ("type", "thinking", "signature"))
                text_field(fields, "signature", path, "")
                thoughts.append(text_field(fields, "thinking", path))
            case _:
                calls.append(_tool_use(block, path))
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        message["reasoning"] = "\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(block: Any, path: str) -> dict[str, Any]:
    unsupported = {"caller": neutral({"type": "direct"}), "toolset_name": neutral(), **HINTS}
    fields = known_fields(block, path, ("type", "id", "name", "input"), unsupported)
    if not isinstance(fields.get("input"), dict):
        raise InvalidRequestError(f"{path}.input must be an object.", param=f"{path}.input")
    arguments = msgspec.json.encode(fields["input"]).decode()
    function = {"name": text_field(fields, "name", path), "arguments": arguments}
    return {"id": text_field(fields, "id", path), "type": "function", "function": function}


def _user(blocks: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    texts: list[str] = []  # neighbours, joined once: there may be thousands

    def end() -> None:
        if texts:
            messages.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for path, block in blocks:
        if _kind(block, path, ("text", "tool_result")) == "text":
            texts.append(_text(block, path))
        else:
            end()
            messages.append(_tool_result(block, path))
    end()
    return messages or [{"role": "user", "content": ""}]


def _tool_result(block: Any, path: str) -> dict[str, Any]:
    unsupported = {"toolset_name": neutral(), **HINTS}
    fields = known_fields(block, path, ("type", "tool_use_id", "content", "is_error"), unsupported)
    content = fields.get("content", "")
    text = content if isinstance(content, str) else _texts(content, f"{path}.content")
    failed = fields.get("is_error", False)
    if not isinstance(failed, bool):
        raise InvalidRequestError(f"{path}.is_error must be true or false.", param=f"{path}.is_error")
    # Chat templates have no word for a failure: the model reads it in the text.
    return {
        "role": "tool",
        "tool_call_id": text_field(fields, "tool_use_id", path),
        "content": f"Error: {text}" if failed else text,
    }


def _texts(value: Any, path: str) -> str:
    if not isinstance(value, list):
        raise InvalidRequestError(f"{path} must be a string or a list of text blocks.", param=path)
    texts: list[str] = []
    for index, block in enumerate(cast("list[Any]", value)):
        place = f"{path}[{index}]"
        _kind(block, place, ("text",))
        texts.append(_text(block, place))
    return "\n".join(texts)


def _text(block: Any, path: str) -> str:
    fields = known_fields(block, path, ("type", "text"), {"citations": neutral([]), **HINTS})
    return text_field(fields, "text", path)


def _kind(block: Any, path: str, allowed: tuple[str, ...]) -> str:
    if not isinstance(block, dict):
        raise InvalidRequestError(
            f"{path} must be an object such as {{'type': 'text', 'text': '…'}}.", param=path
        )
    kind = cast("Mapping[str, Any]", block).get("type")
    if not isinstance(kind, str) or kind not in allowed:
        raise UnsupportedError(
            f"{path}.type {repr(kind)[:100]} is not supported here: use {', '.join(allowed)}.",
            param=f"{path}.type",
        )
    return kind
