"""ResponseStore: finished and running responses in memory, within bounds of bytes and age.

The oldest finished responses go first; one that still runs is never dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.errors import QueueFullError
from jaxserve.server.errors import HTTPProblem
from jaxserve.server.openai.responses_api.objects import Response

OVERHEAD_BYTES = 4096
"""Counted for every response beside its text: the objects around it."""


class ResponseNotFoundError(HTTPProblem):
    """No response of this id is stored (any more)."""

    def __init__(self, response_id: str, param: str) -> None:
        super().__init__(
            404,
            f"Response with id {response_id[:100]!r} not found: it was never stored, was deleted, or is too old.",
            type="NotFoundError",
            param=param,
        )


class EventLog:
    """The events of a background response: written once, read from anywhere by whoever comes."""

    def __init__(self) -> None:
        self.events: list[bytes] = []
        self.num_bytes = 0
        self.closed = False
        self._changed = asyncio.Event()

    def append(self, events: list[bytes]) -> None:
        self.events += events
        self.num_bytes += sum(map(len, events))
        self._wake()

    def close(self) -> None:
        self.closed = True
        self._wake()

    async def follow(self, start: int) -> AsyncIterator[bytes]:
        """The events from the one with number ``start`` on, to the last."""
        while start < len(self.events) or not self.closed:
            if start >= len(self.events):
                await self._changed.wait()
                continue
            events = self.events[start:]
            start += len(events)
            yield b"".join(events)

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


@dataclass
class StoredResponse:
    """A response, and what it takes to go on from it.

    Args:
        response: as clients see it; while it runs it changes.
        messages: the conversation up to and including its output, as chat messages, without instructions.
        input_items: the request's own input.
        num_bytes: what it holds, roughly.
        cancel: ends it, while it runs in the background.
        log: its events, if it was created with ``background`` and ``stream``.
    """

    response: Response
    messages: list[dict[str, Any]]
    input_items: list[dict[str, Any]]
    num_bytes: int
    cancel: Callable[[], Awaitable[None]] | None = None
    log: EventLog | None = None
    deleted: bool = False
    """Its client deleted it: it is not to be stored again."""
    created: float = 0.0
    counted_bytes: int = 0
    """What the store counts for it: its size when it was last put."""

    def start_log(self) -> None:
        """Keep its events from now on."""
        self.log = EventLog()

    @property
    def running(self) -> bool:
        return self.response.status in ("queued", "in_progress")

    @property
    def total_bytes(self) -> int:
        return OVERHEAD_BYTES + self.num_bytes + (self.log.num_bytes if self.log else 0)


class ResponseStore:
    """Responses by id.

    Args:
        max_bytes: of all responses together; 0 stores nothing.
        ttl_seconds: how long a response is kept after it was last changed.
        clock: seconds, monotonic.
    """

    def __init__(
        self, max_bytes: int, ttl_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_bytes = max_bytes
        self._ttl = ttl_seconds
        self._clock = clock
        self._entries: dict[str, StoredResponse] = {}
        """In the order in which they were put: the oldest first."""
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def enabled(self) -> bool:
        return self.max_bytes > 0

    @property
    def num_bytes(self) -> int:
        """Of all responses, each as it was when it was put."""
        return self._num_bytes

    def put(self, entry: StoredResponse) -> None:
        """Store or renew ``entry``; older ones may go. One that is too large for the store is not kept."""
        self._remove(entry.response.id)
        entry.created = self._clock()
        entry.counted_bytes = entry.total_bytes
        self._entries[entry.response.id] = entry
        self._num_bytes += entry.counted_bytes
        self._shrink()

    def check_room(self) -> None:
        """Refuse another background response when running ones alone fill the store.

        Raises:
            QueueFullError: they do.
        """
        running = sum(entry.total_bytes for entry in self._entries.values() if entry.running)
        if running >= self.max_bytes:
            raise QueueFullError("Too many background responses are running already; try again later.")

    def __contains__(self, response_id: str) -> bool:
        entry = self._entries.get(response_id)
        return entry is not None and not self._expired(entry)

    def get(self, response_id: str, *, param: str = "response_id") -> StoredResponse:
        """
        Args:
            response_id: its id.
            param: how the request spelt that.

        Raises:
            ResponseNotFoundError: it is not here.
        """
        entry = self._entries.get(response_id)
        if entry is None or self._expired(entry):
            raise ResponseNotFoundError(response_id, param)
        return entry

    def items(self, ids: Collection[str]) -> dict[str, dict[str, Any]]:
        """Those of the input and output items with these ids that are stored, in one pass."""
        found: dict[str, dict[str, Any]] = {}
        for entry in self._entries.values() if ids else ():
            if self._expired(entry):
                continue
            found.update((item["id"], item) for item in entry.input_items if item["id"] in ids)
            outputs = [item for item in entry.response.output if item.id in ids]
            found.update((item.id, msgspec.to_builtins(item)) for item in outputs)
        return found

    def delete(self, response_id: str) -> StoredResponse:
        """
        Raises:
            ResponseNotFoundError: it is not here.
        """
        entry = self.get(response_id)
        entry.deleted = True
        self._remove(response_id)
        return entry

    def _remove(self, response_id: str) -> None:
        entry = self._entries.pop(response_id, None)
        if entry is not None:
            self._num_bytes -= entry.counted_bytes

    def _expired(self, entry: StoredResponse) -> bool:
        return not entry.running and self._clock() - entry.created > self._ttl

    def _shrink(self) -> None:
        excess = self._num_bytes - self.max_bytes
        leaving: list[str] = []
        for response_id, entry in self._entries.items():
            if excess <= 0 and not self._expired(entry):
                break
            if not entry.running:
                leaving.append(response_id)
                excess -= entry.counted_bytes
        for response_id in leaving:
            self._remove(response_id)
