"""The input of a response: a text, or items (messages, calls and their outputs, reasoning), to chat messages.

Items that one assistant turn consists of (reasoning, text, calls) become one message, as chat templates expect.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
from pydantic import BaseModel, Discriminator, Tag

from jaxserve.errors import InvalidRequestError, UnsupportedError
from jaxserve.server.field_names import choice_field, known_fields, neutral, text_field

MAX_ITEMS = 65536
ROLES = ("user", "system", "developer", "assistant")
TEXT_PARTS = ("input_text", "output_text", "text", "refusal")
FOREIGN_PARTS = ("input_image", "input_file", "input_audio")
STATUSES = ("in_progress", "completed", "incomplete")
FOREIGN_ITEMS = frozenset(
    {
        "additional_tools", "apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "compaction",
        "compaction_trigger", "computer_call", "computer_call_output", "custom_tool_call",
        "custom_tool_call_output", "file_search_call", "image_generation_call",
        "local_shell_call", "local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call",
        "mcp_list_tools", "program", "program_output", "shell_call", "shell_call_output", "tool_search_call",
        "tool_search_output", "web_search_call",
    }
)  # fmt: skip
"""OpenAI's items that belong to tools which run on OpenAI's servers."""


# --- for the API's schema ----------------------------------------------------------------------------------


class InputText(BaseModel):
    """A part of a message's content. Only text is supported."""

    type: Literal["input_text", "output_text"]
    text: str


class InputMessage(BaseModel):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: str | list[InputText]


class InputCall(BaseModel):
    """A call that the model made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputCallOutput(BaseModel):
    """What the call returned."""

    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]


class SummaryPart(BaseModel):
    type: Literal["summary_text"]
    text: str


class ReasoningPart(BaseModel):
    type: Literal["reasoning_text"]
    text: str


class InputReasoning(BaseModel):
    """What the model thought."""

    type: Literal["reasoning"]
    summary: list[SummaryPart]
    content: list[ReasoningPart] | None = None


class ItemReference(BaseModel):
    """An item of a stored response."""

    type: Literal["item_reference"]
    id: str


def _kind(item: Any) -> str:
    return item.get("type", "message") if isinstance(item, dict) else "message"


InputItem = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[InputCall, Tag("function_call")]
    | Annotated[InputCallOutput, Tag("function_call_output")]
    | Annotated[InputReasoning, Tag("reasoning")]
    | Annotated[ItemReference, Tag("item_reference")],
    Discriminator(_kind),
]


# --- checking ----------------------------------------------------------------------------------------------


def parse_input(value: Any) -> list[dict[str, Any]]:
    """The items of a request's ``input``, each with its type and an id.

    Raises:
        InvalidRequestError: with the field's path, such as ``input[0].content``.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise InvalidRequestError("input must be a string or a list of items.", param="input")
    items = cast("list[Any]", value)
    if not items:
        raise InvalidRequestError("input is empty; send a text or at least one item.", param="input")
    if len(items) > MAX_ITEMS:
        raise InvalidRequestError(
            f"input holds {len(items)} items; at most {MAX_ITEMS} are allowed.", param="input"
        )
    return [_parse_item(item, f"input[{index}]") for index, item in enumerate(items)]


def _parse_item(item: Any, path: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise InvalidRequestError(f"{path} must be an object.", param=path)
    fields = cast("dict[str, Any]", item)
    kind = fields.get("type")
    if kind is None:
        kind = "message" if "role" in fields else "item_reference" if "id" in fields else None
    match kind:
        case "message":
            checked = _message(fields, path)
        case "function_call":
            checked = _call(fields, path)
        case "function_call_output":
            checked = _call_output(fields, path)
        case "reasoning":
            checked = _reasoning(fields, path)
        case "item_reference":
            text_field(known_fields(fields, path, ("id", "type")), "id", path)
            checked = {}
        case _:
            raise _wrong_type(kind, path)
    prefix = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}.get(
        kind
    )
    identity = fields.get("id") or f"{prefix}_{secrets.token_hex(16)}"
    if not isinstance(identity, str):
        raise InvalidRequestError(f"{path}.id must be a string.", param=f"{path}.id")
    if "status" in fields and fields["status"] is not None:
        choice_field(fields, "status", path, STATUSES)
    return {"id": identity, "type": kind, **checked}


def _wrong_type(kind: Any, path: str) -> InvalidRequestError:
    shown = repr(kind)[:100]
    param = f"{path}.type"
    if isinstance(kind, str) and kind in FOREIGN_ITEMS:
        return UnsupportedError(f"{param} {shown} is not supported by this server; remove it.", param=param)
    return InvalidRequestError(
        f"{param} must be message, function_call, function_call_output or reasoning, got {shown}.",
        param=param,
    )


def _message(item: dict[str, Any], path: str) -> dict[str, Any]:
    fields = known_fields(item, path, ("id", "type", "status", "role", "content"), {"phase": neutral()})
    role = choice_field(fields, "role", path, ROLES)
    content = fields.get("content")
    kind = "output_text" if role == "assistant" else "input_text"
    return {
        "role": role,
        "status": fields.get("status", "completed"),
        "content": _text_parts(content, f"{path}.content", kind),
    }


def _call(item: dict[str, Any], path: str) -> dict[str, Any]:
    fields = known_fields(
        item,
        path,
        ("id", "type", "status", "call_id", "name", "arguments"),
        {"caller": neutral({"type": "direct"}), "namespace": neutral(), "async": neutral(False)},
    )
    return {
        "call_id": text_field(fields, "call_id", path),
        "name": text_field(fields, "name", path),
        "arguments": _arguments(fields, path),
        "status": fields.get("status", "completed"),
    }


def _arguments(fields: dict[str, Any], path: str) -> str:
    text = text_field(fields, "arguments", path, "")
    try:
        msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        param = f"{path}.arguments"
        raise InvalidRequestError(f"{param} is not valid JSON: {error}", param=param) from None
    return text or "{}"


def _call_output(item: dict[str, Any], path: str) -> dict[str, Any]:
    fields = known_fields(
        item,
        path,
        ("id", "type", "status", "call_id", "name", "output"),
        {"caller": neutral({"type": "direct"}), "namespace": neutral()},
    )
    output = fields.get("output")
    if not isinstance(output, str):
        output = _text_parts(output, f"{path}.output", "input_text")
    return {
        "call_id": text_field(fields, "call_id", path),
        "output": output,
        "status": fields.get("status", "completed"),
    }


def _reasoning(item: dict[str, Any], path: str) -> dict[str, Any]:
    fields = known_fields(
        item, path, ("id", "type", "status", "summary", "content"), {"encrypted_content": neutral()}
    )
    return {
        "summary": _plain_texts(fields.get("summary", []), f"{path}.summary", ("summary_text",)),
        "content": _plain_texts(fields.get("content", []), f"{path}.content", ("reasoning_text", "text")),
    }


def _plain_texts(value: Any, path: str, types: Sequence[str]) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = []
    for index, part in enumerate(_list(value, path)):
        place = f"{path}[{index}]"
        fields = known_fields(part, place, ("type", "text"))
        kind = choice_field(fields, "type", place, types)
        parts.append({"type": kind, "text": text_field(fields, "text", place)})
    return parts


def _text_parts(value: Any, path: str, kind: str) -> list[dict[str, Any]]:
    """A message's content as parts of ``kind``."""
    if isinstance(value, str):
        return [{"type": kind, "text": value}]
    if value is None:
        raise InvalidRequestError(f"{path} is missing.", param=path)
    return [
        {"type": kind, "text": _part_text(part, f"{path}[{index}]")}
        for index, part in enumerate(_list(value, path))
    ]


def _part_text(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise InvalidRequestError(
            f"{path} must be an object such as {{'type': 'input_text', 'text': '…'}}.", param=path
        )
    fields = cast("dict[str, Any]", part)
    kind = fields.get("type")
    if not isinstance(kind, str) or kind not in TEXT_PARTS:
        raise UnsupportedError(
            f"{path}.type {repr(kind)[:100]} is not supported: this model takes text only.",
            param=f"{path}.type",
        )
    # An answer comes back as it was sent: what belongs to a text that was generated says nothing new.
    known = ("type", "text", "refusal", "annotations", "logprobs", "parsed")
    fields = known_fields(fields, path, known, {"prompt_cache_breakpoint": neutral()})
    return text_field(fields, "refusal" if kind == "refusal" else "text", path)


def _list(value: Any, path: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequestError(f"{path} must be a list of objects (or a string).", param=path)
    return cast("list[Any]", value)


def resolve_references(
    items: Sequence[dict[str, Any]], find: Callable[[Collection[str]], Mapping[str, dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The items, with those that references name in the references' place.

    Args:
        items: checked.
        find: stored items by their ids; what is not stored is left out.

    Raises:
        InvalidRequestError: there is no such item, or it is named twice.
    """
    stored = dict(find({item["id"] for item in items if item["type"] == "item_reference"}))
    result: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        if item["type"] == "item_reference":
            # Once each: a short request could ask for any amount of text otherwise.
            found = stored.pop(item["id"], None)
            if found is None:
                raise InvalidRequestError(
                    f"input[{index}].id {item['id'][:100]!r} names no stored item, or one that was named before.",
                    param=f"input[{index}].id",
                )
            item = found
        result.append(item)
    return result


# --- to chat messages --------------------------------------------------------------------------------------


def chat_messages(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Checked items, or the items of an output, as chat messages in OpenAI's chat form."""
    messages: list[dict[str, Any]] = []
    turn: _Turn | None = None
    for item in items:
        if item["type"] == "function_call_output" or item.get("role", "assistant") != "assistant":
            _end(turn, messages)
            turn = None
            messages.append(_other_message(item))
            continue
        if turn is None or (item["type"] != "function_call" and turn.calls):
            _end(turn, messages)
            turn = _Turn()
        turn.add(item)
    _end(turn, messages)
    return messages


def _end(turn: _Turn | None, messages: list[dict[str, Any]]) -> None:
    if turn is not None:
        messages.append(turn.message())


class _Turn:
    """One message of the assistant's, put together; texts are joined once, since there may be thousands."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[dict[str, Any]] = []

    def add(self, item: dict[str, Any]) -> None:
        match item["type"]:
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                self.calls.append({"id": item["call_id"], "type": "function", "function": function})
            case "reasoning":
                self.thoughts.append(_joined(item["content"] or item["summary"]))
            case _:
                self.texts.append(_joined(item["content"]))

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(filter(None, self.texts))}
        if reasoning := "\n".join(filter(None, self.thoughts)):
            message["reasoning"] = reasoning
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def _other_message(item: dict[str, Any]) -> dict[str, Any]:
    if item["type"] == "function_call_output":
        return {"role": "tool", "tool_call_id": item["call_id"], "content": _joined(item["output"])}
    return {"role": item["role"], "content": _joined(item["content"])}


def _joined(parts: str | list[dict[str, Any]]) -> str:
    return parts if isinstance(parts, str) else "\n".join(part["text"] for part in parts)
