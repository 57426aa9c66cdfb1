"""Command line flags generated from the config dataclasses, parsed back into them, and their reference.

A setting is declared once, as a dataclass field: its flag, type, choices, help and default follow from it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable, Collection, Sequence
from fractions import Fraction
from typing import Any, TypeVar

T = TypeVar("T")

SIZE_SUFFIXES = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 2**10,
    "M": 2**20,
    "G": 2**30,
    "T": 2**40,
}
"""As in vLLM: small letters are powers of ten, capitals powers of two."""


BACKSLASH_BAR = "\\|"
_SIZE = re.compile(r"(-?[0-9]{1,30}(?:\.[0-9]{1,30})?)([a-zA-Z]?)")


def parse_size(text: str) -> int:
    """``1k`` is 1000, ``1K`` is 1024, ``1.5G`` is 3 * 2**29; also m, g, t, M, T.

    Raises:
        ValueError: not a size, or no whole number.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or match[2] not in SIZE_SUFFIXES:
        raise ValueError(f"{text!r} is not a size such as 4096, 8k (8000), 8K (8192) or 2G")
    exact = Fraction(match[1]) * SIZE_SUFFIXES[match[2]]
    if exact.denominator != 1:
        raise ValueError(f"{text!r} is not a whole number")
    return int(exact)


def add_config_flags(
    parser: argparse.ArgumentParser, configs: Sequence[type[Any]], *, only: Collection[str] | None = None
) -> None:
    """Add one group of flags per config class, or of the fields ``only`` of them. Flags that are not given leave no
    trace in the result."""
    for config in configs:
        title = config.__name__.removesuffix("Config").lower()
        group = parser.add_argument_group(title, _first_line(config))
        hints = typing.get_type_hints(config)
        for field in dataclasses.fields(config):
            if only is not None and field.name not in only:
                continue
            flags = [flag_name(field.name), *field.metadata.get("flags", ())]
            group.add_argument(
                *flags, dest=field.name, default=argparse.SUPPRESS, **_options(field, hints[field.name])
            )


def config_from_flags(config: type[T], namespace: argparse.Namespace) -> T:
    """An instance of ``config`` from the flags given.

    Raises:
        ConfigError: a value that the config refuses.
    """
    return config(**flags_given([config], namespace))


def flags_given(configs: Sequence[type[Any]], namespace: argparse.Namespace) -> dict[str, Any]:
    """The values of the flags of ``configs`` that were given, by field name."""
    names = [field.name for config in configs for field in dataclasses.fields(config)]
    return {name: getattr(namespace, name) for name in names if hasattr(namespace, name)}


def normalise_flags(arguments: Sequence[str]) -> list[str]:
    """``--max_num_seqs=4`` is read as ``--max-num-seqs=4``; values stay as they are."""
    result: list[str] = []
    for index, argument in enumerate(arguments):
        if argument == "--":
            return [*result, *arguments[index:]]
        if argument.startswith("--"):
            name, equals, value = argument.partition("=")
            argument = name.replace("_", "-") + equals + value
        result.append(argument)
    return result


def flag_reference(configs: Sequence[type[Any]]) -> str:
    """All flags of ``configs`` as Markdown, a table per config."""
    parts: list[str] = []
    for config in configs:
        hints = typing.get_type_hints(config)
        rows = [_row(field, hints[field.name]) for field in dataclasses.fields(config)]
        head = [
            f"## {config.__name__}",
            "",
            _first_line(config),
            "",
            "| flag | default | meaning |",
            "|---|---|---|",
        ]
        parts.append("\n".join([*head, *rows]))
    return "\n\n".join(parts) + "\n"


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")


def _options(field: dataclasses.Field[Any], annotation: Any) -> dict[str, Any]:
    """What argparse is told about a field."""
    help_text = _help(field).replace("%", "%%")
    if _plain(annotation) is bool:
        return {"action": argparse.BooleanOptionalAction, "help": help_text}
    if field.metadata.get("parse") == "list":
        return {"nargs": "+", "action": "extend", "metavar": "VALUE", "help": help_text}
    options: dict[str, Any] = {"type": _parser(field, annotation), "help": help_text}
    if field.metadata.get("choices"):
        options["choices"] = field.metadata["choices"]
    else:
        options["metavar"] = _metavar(field, annotation)
    return options


def _parser(field: dataclasses.Field[Any], annotation: Any) -> Callable[[str], Any]:
    kind = field.metadata.get("parse")
    if kind == "json":
        return _naming_errors(_json_object)
    if kind == "size":
        accepts_words = str in typing.get_args(annotation)
        return _naming_errors(_size_or_word if accepts_words else parse_size)
    return _plain(annotation)


def _naming_errors(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Hand the reason of a ValueError to argparse, which else would only say ``invalid value``."""

    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _size_or_word(text: str) -> int | str:
    return text if text.isalpha() else parse_size(text)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError("not a JSON object, such as '{\"temperature\": 0}'")
    return typing.cast("dict[str, Any]", value)


def _plain(annotation: Any) -> Any:
    """The one type that an annotation such as ``int | None`` stands for."""
    if isinstance(annotation, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        return members[0]
    return annotation


def _metavar(field: dataclasses.Field[Any], annotation: Any) -> str:
    kind = field.metadata.get("parse")
    return kind.upper() if kind in ("json", "size") else _plain(annotation).__name__.upper()


def _help(field: dataclasses.Field[Any]) -> str:
    text: str = field.metadata["help"]
    default = _default(field)
    return text if default is None else f"{text} (default: {default})"


def _default(field: dataclasses.Field[Any]) -> str | None:
    """The default as a user would write it; None where the help says what happens without one."""
    if field.default is dataclasses.MISSING or field.default is None or field.default == "":
        return None
    return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)


def _row(field: dataclasses.Field[Any], annotation: Any) -> str:
    flags = [*field.metadata.get("flags", ()), flag_name(field.name)]
    if _plain(annotation) is bool:
        flags.append("--no-" + flag_name(field.name).removeprefix("--"))
    spelt = ", ".join(f"`{flag}`" for flag in flags)
    meaning = field.metadata["help"]
    if field.metadata.get("choices"):
        meaning += " One of " + ", ".join(f"`{choice}`" for choice in field.metadata["choices"]) + "."
    default = _default(field)
    shown = "" if default is None else f"`{default}`"
    return f"| {spelt} | {shown} | {meaning.replace('|', BACKSLASH_BAR)} |"


def _first_line(config: type[Any]) -> str:
    return (config.__doc__ or "").strip().splitlines()[0]
