"""``--config FILE.yaml``: flags from a file, as if they stood on the command line before its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import yaml

from jaxserve.config.cli_flags import flag_name
from jaxserve.errors import ConfigError

FLAG = "--config"


def expand_config_file(arguments: Sequence[str]) -> list[str]:
    """``arguments`` with the flags of the file that ``--config`` names; a flag that is given too wins.

    Raises:
        ConfigError: the file cannot be read, or holds no flags; or two files are named.
    """
    rest, paths = _split(arguments)
    if not paths:
        return rest
    if len(paths) > 1:
        raise ConfigError(f"--config is given {len(paths)} times; name one file.", param="config")
    given = {_name(argument) for argument in rest if argument.startswith("-")}
    positional = bool(rest) and not rest[0].startswith("-")
    flags: list[str] = []
    for name, value in _read(paths[0]).items():
        flag = flag_name(name.removeprefix("--").replace("-", "_"))
        if flag in given or (flag == "--model" and positional):
            continue
        flags += as_flags(flag, value)
    return [*rest[:1], *flags, *rest[1:]] if positional else [*flags, *rest]


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    rest: list[str] = []
    paths: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == FLAG:
            path = next(remaining, None)
            if path is None:
                raise ConfigError("--config needs the path of a YAML file.", param="config")
            paths.append(path)
        elif argument.startswith(FLAG + "="):
            paths.append(argument.removeprefix(FLAG + "="))
        else:
            rest.append(argument)
    return rest, paths


def _name(argument: str) -> str:
    name = argument.partition("=")[0].replace("_", "-")
    return "--" + name.removeprefix("--no-") if name.startswith("--no-") else name


def _read(path: str) -> Mapping[str, Any]:
    try:
        content = yaml.safe_load(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config {path!r} cannot be read: {error}", param="config") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in cast("Any", content)):
        raise ConfigError(
            f"--config {path!r} must map flags to values, such as 'max-num-seqs: 16'.", param="config"
        )
    return cast("dict[str, Any]", content)


def as_flags(flag: str, value: Any) -> list[str]:
    """``flag`` and a value out of YAML, as words of a command line."""
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else "--no-" + flag.removeprefix("--")]
    if isinstance(value, list):
        return [flag, *map(str, cast("list[Any]", value))] if value else []
    # With an equals sign: the value may begin with a dash.
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]
