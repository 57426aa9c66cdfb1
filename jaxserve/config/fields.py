"""How a config field describes itself: help text, flag spelling, choices; and how kwargs become configs."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from typing import Any, TypeVar, cast

from jaxserve.errors import ConfigError

T = TypeVar("T")


def setting(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    flags: tuple[str, ...] = (),
    parse: str | None = None,
) -> Any:
    """A dataclass field that can become a command line flag.

    Args:
        default: the value when nothing is given.
        help: one sentence for ``--help`` and the flag reference.
        choices: the allowed values.
        flags: further spellings, such as ``-tp``.
        parse: how the command line reads the value where the annotation does not say: ``json``, ``size``
            (``1k``, ``2G``), ``list``.
    """
    metadata = {"help": help, "choices": choices, "flags": flags, "parse": parse}
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=lambda: copy.copy(cast(Any, default)), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def check_choices(config: Any) -> None:
    """Refuse a value outside its field's ``choices``."""
    for field in dataclasses.fields(config):
        choices = field.metadata.get("choices")
        value = getattr(config, field.name)
        if choices and value is not None and value not in choices:
            raise ConfigError(
                f"{field.name} is {value!r}; it must be one of {', '.join(map(repr, choices))}.",
                param=field.name,
            )


def check_at_least(config: Any, low: float, *names: str) -> None:
    """Refuse numbers below ``low`` (None passes)."""
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ConfigError(f"{name} must be a number, got {value!r}.", param=name)
        if value < low:
            raise ConfigError(f"{name} must be at least {low}, got {value}.", param=name)


def split_kwargs(kwargs: dict[str, Any], configs: list[type[Any]]) -> list[dict[str, Any]]:
    """Distribute flat keyword arguments to the config classes that declare them.

    Raises:
        ConfigError: naming an unknown argument and the closest known one.
    """
    owners = {f.name: i for i, cls in enumerate(configs) for f in dataclasses.fields(cls)}
    parts: list[dict[str, Any]] = [{} for _ in configs]
    for name, value in kwargs.items():
        if name not in owners:
            close = difflib.get_close_matches(name, owners, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ConfigError(f"Unknown engine argument {name!r}.{hint}", param=name)
        parts[owners[name]][name] = value
    return parts
