"""The engine core's process with a FakeRunner: the real scheduler and wire, no device. Settings come as JSON in the
variable FAKE_RUNNER."""

from __future__ import annotations

import json
import logging
import os
from typing import Any

from fake_runner import FakeRow, FakeRunner

import jaxserve.engine.core_process as core_process
from jaxserve.config import EngineConfig
from jaxserve.engine.core import EngineCore

LETTERS = range(68, 94)
"""Tokens of the tiny checkpoints' tokenizer that are letters."""


def letters(row: FakeRow, vocab_size: int) -> int:
    """The alphabet over and over: text of which every token shows, and cheap to make."""
    return LETTERS[len(row.token_ids) % len(LETTERS)]


def create_fake_core(config: EngineConfig) -> EngineCore:
    options: dict[str, Any] = json.loads(os.environ.get("FAKE_RUNNER", "{}"))
    runner = FakeRunner(vocab_size=320, sampler=letters, check=False, **options)
    return EngineCore(config.with_defaults_for("cpu"), runner)


if __name__ == "__main__":
    core_process.create_core = create_fake_core
    code = core_process.main()
    logging.shutdown()
    os._exit(code)
