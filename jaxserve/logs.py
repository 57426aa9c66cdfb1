"""Logging: one short format for the server and the engine core. Logs never hold prompts or outputs."""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

from jaxserve.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
LOG_LEVEL_VARIABLE = "JAXSERVE_LOG_LEVEL"
FIELDS = "fields"
"""Further fields of a line, given as ``extra={FIELDS: {…}}``: JSON lines have them, short ones say them in words."""
_ROOMS = {"jaxserve": 1, "pallas_kernels": 0, "sharding": 0}
"""Top-level packages of ours, and which part of a logger's name says where a line comes from."""


class ShortFormatter(logging.Formatter):
    """``2026-11-29 18:11:14 INFO server: message``: the logger's name is cut to its room."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(room)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.room = room_of(record.name)
        return super().format(record)


class JSONFormatter(logging.Formatter):
    """An object a line: time, level, room, logger, pid and message, then what the line carries under ``FIELDS``."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "room": room_of(record.name),
            "logger": record.name,
            "pid": record.process,
            "message": record.getMessage(),
            **record.__dict__.get(FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        return json.dumps(line, default=str)


def room_of(name: str) -> str:
    """The room from which a logger's lines come."""
    parts = name.split(".")
    return parts[min(_ROOMS.get(parts[0], 0), len(parts) - 1)]


def log_level(given: str | None = None) -> str:
    """The level in force: ``given``, else the environment's JAXSERVE_LOG_LEVEL, else info.

    Raises:
        ConfigError: it is no level.
    """
    level = (given or os.environ.get(LOG_LEVEL_VARIABLE) or "info").lower()
    if level not in LEVELS:
        source = "log_level" if given else LOG_LEVEL_VARIABLE
        raise ConfigError(f"{source} is {level!r}; it must be one of {', '.join(LEVELS)}.", param="log_level")
    return level


def configure_logging(level: str | None = None, format: str | None = None) -> None:
    """Send this process's logs to stderr. Every process of a server calls it once, with the same level and format.

    Args:
        level: one of ``LEVELS``; None is the environment's.
        format: ``text`` or ``json``.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JSONFormatter() if format == "json" else ShortFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    number = getattr(logging, log_level(level).upper())
    for name in _ROOMS:
        logging.getLogger(name).setLevel(number)
    logging.getLogger("uvicorn").setLevel(max(number, logging.WARNING))
    logging.captureWarnings(True)
