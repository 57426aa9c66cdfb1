"""Which fields of a JSON object are known, known but not offered, or unknown; the last two are refused by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from jaxserve.errors import InvalidRequestError, UnsupportedError

MAX_NAME_CHARS = 100

AsksNothing = Callable[[Any], bool]
"""Whether a value asks for nothing: then the field may stay although it is not offered."""


def neutral(*values: Any) -> AsksNothing:
    """None, or one of ``values`` with the same type (True is not 1)."""
    known = (None, *values)
    return lambda value: any(value == other and type(value) is type(other) for other in known)


def known_fields(
    value: Any,
    path: str,
    known: Collection[str],
    unsupported: Mapping[str, AsksNothing] | None = None,
) -> dict[str, Any]:
    """The known fields of an object; None (or null) counts as not given.

    Args:
        value: what should be an object.
        path: its place in the body, such as ``messages[0]``; empty for the body.
        known: fields that are offered.
        unsupported: fields that clients know but that are not offered, and what they may hold nevertheless.

    Raises:
        UnsupportedError: it asks for something that is not offered.
        InvalidRequestError: it is no object, or has a field that nobody knows.
    """
    if not isinstance(value, dict):
        raise InvalidRequestError(f"{path or 'The body'} must be an object.", param=path or None)
    fields = cast("dict[str, Any]", value)
    result: dict[str, Any] = {}
    for name, content in fields.items():
        if name in known:
            if content is not None:
                result[name] = content
            continue
        param = f"{path}.{name[:MAX_NAME_CHARS]}" if path else name[:MAX_NAME_CHARS]
        if unsupported is None or name not in unsupported:
            close = difflib.get_close_matches(name[:MAX_NAME_CHARS], known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise InvalidRequestError(f"Unknown parameter: {param!r}.{hint}", param=param)
        if not unsupported[name](content):
            raise UnsupportedError(f"{param} is not supported by this server; remove it.", param=param)
    return result


def text_field(fields: Mapping[str, Any], name: str, path: str, default: str | None = None) -> str:
    """The string ``fields[name]``.

    Raises:
        InvalidRequestError: it is missing (and has no default), or no string.
    """
    value = fields.get(name, default)
    if not isinstance(value, str):
        problem = "is missing" if value is None else "must be a string"
        raise InvalidRequestError(f"{path}.{name} {problem}.", param=f"{path}.{name}")
    return value


def choice_field(
    fields: Mapping[str, Any], name: str, path: str, choices: Collection[str], default: str | None = None
) -> str:
    """The string ``fields[name]``, one of ``choices``.

    Raises:
        InvalidRequestError: it is another value.
    """
    value = text_field(fields, name, path, default)
    if value not in choices:
        raise InvalidRequestError(
            f"{path}.{name} must be one of {', '.join(choices)}, got {value[:MAX_NAME_CHARS]!r}.",
            param=f"{path}.{name}",
        )
    return value
