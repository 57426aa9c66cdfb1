"""Tools for models whose chat template knows none: described in the system message, in Hermes's form.

The answer's calls are read by the ``hermes`` parser; calls and results of earlier turns become text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.tokenizer import chat_template

PROMPTED_PARSER = "hermes"

_INSTRUCTIONS = """You may call functions to help with the user's request. These are their signatures:
<tools>
{tools}
</tools>
To call a function, answer with one JSON object between tags, for each call:
<tool_call>
{{"name": "the function's name", "arguments": {{"an argument": "its value"}}}}
</tool_call>"""


def takes_tools(template: str) -> bool:
    """Whether a chat template reads ``tools``."""
    return "tools" in chat_template.variables(template)


def in_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> Sequence[Mapping[str, Any]]:
    """The conversation as text alone: ``tools`` in the system message, calls and results in the others.

    Neighbouring user messages and results become one: many templates want users and assistants to alternate.

    Raises:
        InvalidRequestError: calls or contents are not of OpenAI's form.
    """
    result: list[dict[str, Any]] = []
    responses: list[str] = []  # neighbours, joined once: there may be thousands
    try:
        for message in messages:
            if message.get("role") == "tool":
                responses.append(f"<tool_response>\n{_text(message)}\n</tool_response>")
                continue
            _append_responses(result, responses)
            result.append(_with_calls(message) if message.get("tool_calls") else dict(message))
        _append_responses(result, responses)
        if tools:
            _describe(result, tools)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InvalidRequestError(
            f"messages: calls or contents are not of OpenAI's form: {type(error).__name__}: {error}",
            param="messages",
        ) from error
    return result


def _append_responses(result: list[dict[str, Any]], responses: list[str]) -> None:
    """Move ``responses`` to the end of the last user message, or into one of their own."""
    if not responses:
        return
    text = "\n".join(responses)
    responses.clear()
    if result and result[-1].get("role") == "user":
        result[-1]["content"] = f"{_text(result[-1])}\n{text}"
    else:
        result.append({"role": "user", "content": text})


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    parts = [_text(message)] if message.get("content") else []
    for call in message["tool_calls"]:
        function = call["function"]
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        text = json.dumps({"name": function["name"], "arguments": arguments}, ensure_ascii=False)
        parts.append(f"<tool_call>\n{text}\n</tool_call>")
    rest = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**rest, "content": "\n".join(parts)}


def _describe(result: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]]) -> None:
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    text = _INSTRUCTIONS.format(tools=lines)
    if result and result[0].get("role") in ("system", "developer"):
        result[0]["content"] = f"{_text(result[0])}\n\n{text}"
    else:
        result.insert(0, {"role": "system", "content": text})


def _text(message: Mapping[str, Any]) -> str:
    """A message's content as one text."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)
