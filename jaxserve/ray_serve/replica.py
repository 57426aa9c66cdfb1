"""EngineReplica: one engine with the application of ``jaxserve serve`` over it, in one Ray actor."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from starlette.types import Message

from jaxserve.config import EngineConfig, ServerConfig
from jaxserve.engine.async_engine import AsyncEngine
from jaxserve.errors import EngineDeadError
from jaxserve.logs import configure_logging
from jaxserve.ray_serve.calls import Fetched, HTTPCall, ReplicaFailed, answer
from jaxserve.server.app import create_app

logger = logging.getLogger(__name__)

ENGINE_POLL_SECONDS = 0.25
LAST_WORDS_SECONDS = 1.0
"""For telling streams that the engine has died, before the actor ends."""


@dataclass(frozen=True)
class ReplicaTask:
    """What every replica serves: as ``create_app`` and the engine take it."""

    engine_config: EngineConfig
    server_config: ServerConfig
    model_names: tuple[str, ...]
    model_root: str
    chat_template: str | None = None


class EngineReplica:
    """Loads when it is built, which takes a while. When the engine dies, so does the actor: Serve makes another one.

    Args:
        task: what to serve.
    """

    def __init__(self, task: ReplicaTask) -> None:
        config = task.engine_config
        configure_logging(config.compilation_config.log_level, config.observability_config.log_format)
        self._engine = AsyncEngine.from_config(task.engine_config)
        self._app = create_app(
            self._engine, task.server_config, task.model_names, model_root=task.model_root,
            chat_template=task.chat_template,
        )  # fmt: skip
        self._watcher: asyncio.Task[None] | None = None

    async def handle(self, call: HTTPCall) -> AsyncGenerator[list[Message]]:
        """The messages of the answer, some at a time; the first ones hold bytes of the body.

        Raises:
            ReplicaFailed: the engine died, and nothing was answered yet.
        """
        self._watch()
        held: list[Message] = []
        async for batch in answer(self._app, call):
            held += batch
            if held[-1]["type"] == "http.response.start":
                continue  # an answer begins with its first bytes
            # What an engine said when it died is no answer while another one can give one.
            if self._engine.errored is not None and held[0]["type"] == "http.response.start":
                raise ReplicaFailed(_replica_id())
            yield held
            held = []

    async def fetch(self, call: HTTPCall) -> Fetched:
        """A whole answer, of something that is asked of every replica."""
        self._watch()
        messages = [message async for batch in answer(self._app, call) for message in batch]
        body = b"".join(message.get("body", b"") for message in messages)
        return Fetched(_replica_id(), messages[0]["status"], messages[0]["headers"], body)

    async def check_health(self) -> None:
        """Serve asks this all the time, and replaces a replica that raises."""
        self._watch()
        if self._engine.errored is not None:
            raise EngineDeadError(f"The engine has stopped: {self._engine.errored}")

    def __del__(self) -> None:
        # Serve calls this when the replica is to end, after its requests have; the engine's processes end with it.
        if hasattr(self, "_engine"):
            self._engine.shutdown()

    def _watch(self) -> None:
        if self._watcher is None:
            self._watcher = asyncio.create_task(self._end_with_engine())

    async def _end_with_engine(self) -> None:
        while self._engine.errored is None:
            await asyncio.sleep(ENGINE_POLL_SECONDS)
        logger.error("The engine has stopped, and this replica with it: %s", self._engine.errored)
        await asyncio.sleep(LAST_WORDS_SECONDS)
        os._exit(1)


def _replica_id() -> str:
    from ray import serve

    context: Any = serve.get_replica_context()
    return context.replica_id.unique_id
