"""Logging: one short format for the server and the engine core. Logs never hold prompts or outputs."""

from __future__ import annotations

import logging
import os
import sys

from jaxserve.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
LOG_LEVEL_VARIABLE = "JAXSERVE_LOG_LEVEL"
_ROOMS = {"jaxserve": 1, "pallas_kernels": 0, "sharding": 0}
"""Top-level packages of ours, and which part of a logger's name says where a line comes from."""


class ShortFormatter(logging.Formatter):
    """``2026-11-29 18:11:14 INFO server: message``: the logger's name is cut to its room."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(room)s: %(message)s", datefmt="%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        parts = record.name.split(".")
        position = min(_ROOMS.get(parts[0], 0), len(parts) - 1)
        record.room = parts[position]
        return super().format(record)


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


def configure_logging(level: str | None = None) -> None:
    """Send this process's logs to stderr. Every process of a server calls it once, with the same level."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(ShortFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    number = getattr(logging, log_level(level).upper())
    for name in _ROOMS:
        logging.getLogger(name).setLevel(number)
    logging.getLogger("uvicorn").setLevel(max(number, logging.WARNING))
    logging.captureWarnings(True)
