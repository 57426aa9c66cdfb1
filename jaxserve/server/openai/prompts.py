"""The prompt of a completion request: a text, token ids, or a list of either."""

from __future__ import annotations

from typing import Any, cast

from jaxserve.errors import InvalidRequestError
from jaxserve.server.generation import MAX_PROMPTS

CompletionPrompt = str | list[int]


def parse_prompts(value: Any) -> list[CompletionPrompt]:
    """The prompts of one request, in order.

    Raises:
        InvalidRequestError: empty, too many, or of another shape.
    """
    if isinstance(value, str):
        return [_checked(value, "prompt")]
    if not isinstance(value, list):
        raise _wrong(f"prompt must be a string or a list, got {_kind(value)}.")
    items = cast("list[Any]", value)
    if not items:
        raise _wrong("prompt is empty; send a text or token ids.")
    if _all_ids(items):
        return [cast("list[int]", items)]
    if len(items) > MAX_PROMPTS:
        raise _wrong(f"prompt holds {len(items)} prompts; at most {MAX_PROMPTS} are allowed.")
    if type(items[0]) is not str and not isinstance(items[0], list):
        raise _wrong(f"prompt must hold strings, token ids, or lists of token ids, got {_kind(items[0])}.")
    return [_checked(item, f"prompt[{index}]", type(items[0])) for index, item in enumerate(items)]


def _checked(item: Any, name: str, expected: type = str) -> CompletionPrompt:
    if type(item) is not expected:
        raise _wrong(f"{name} is {_kind(item)}, but the other prompts are not; do not mix them.")
    if not item:
        raise _wrong(f"{name} is empty; send a text or token ids.")
    if isinstance(item, list) and not _all_ids(cast("list[Any]", item)):
        raise _wrong(f"{name} must hold token ids only (integers of at least 0).")
    return item


def _all_ids(items: list[Any]) -> bool:
    # bool is an int to isinstance; a token id is not a bool, and fits 63 bits.
    return all(type(item) is int and 0 <= item < 2**63 for item in items)


def _kind(value: Any) -> str:
    names = {str: "text", list: "a list", dict: "an object", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _wrong(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="prompt")
