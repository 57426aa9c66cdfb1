"""JaxProfiler: traces of the device and of this process, as TensorBoard and Perfetto read them."""

from __future__ import annotations

import logging
from pathlib import Path

import jax

logger = logging.getLogger(__name__)


class JaxProfiler:
    """One profile at a time, each in a folder of its own below ``folder/plugins/profile``.

    Args:
        folder: made when the first profile begins.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder).expanduser()

    def start(self) -> None:
        """Begin a profile."""
        self._folder.mkdir(parents=True, exist_ok=True)
        jax.profiler.start_trace(self._folder)
        logger.info("A profile begins")

    def stop(self) -> None:
        """End it and write it: seconds, for a long one."""
        jax.profiler.stop_trace()
        logger.info("The profile is in %s", self._folder)
