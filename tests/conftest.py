"""Tests run on the CPU with 8 virtual devices, unless the environment says otherwise. Imports no JAX."""

import logging
import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
DEVICES_FLAG = "--xla_force_host_platform_device_count"
if DEVICES_FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {DEVICES_FLAG}=8".strip()


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """A command that a test runs in this process configures logging for all; take that back."""
    loggers = [
        logging.getLogger(name) for name in (None, "jaxserve", "pallas_kernels", "sharding", "uvicorn")
    ]
    before = [(logger, logger.level, list(logger.handlers)) for logger in loggers]
    yield
    for logger, level, handlers in before:
        logger.setLevel(level)
        logger.handlers[:] = handlers
    logging.captureWarnings(False)
