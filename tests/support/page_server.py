"""An application behind a real socket, in a thread of its own: for what blocks while it talks to a server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from fastapi import FastAPI
from live_server import live_server


class ThreadedServer:
    """Where it listens, and how to do something in its event loop."""

    def __init__(self) -> None:
        self.url = ""
        self.loop = asyncio.new_event_loop()
        self.started = threading.Event()
        self.stop = asyncio.Event()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, in the server's thread."""

        async def run() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(30)

    def run(self, make_app: Callable[[], FastAPI]) -> None:
        async def serve() -> None:
            async with live_server(make_app()) as self.url:
                self.started.set()
                await self.stop.wait()

        try:
            self.loop.run_until_complete(serve())
        finally:
            self.started.set()
            self.loop.close()


@contextlib.contextmanager
def threaded_server(make_app: Callable[[], FastAPI]) -> Iterator[ThreadedServer]:
    """Serve what ``make_app`` returns meanwhile."""
    server = ThreadedServer()
    thread = threading.Thread(target=server.run, args=(make_app,), daemon=True)
    thread.start()
    server.started.wait(60)
    try:
        assert server.url, "the server did not start"
        yield server
    finally:
        if server.url:
            server.loop.call_soon_threadsafe(server.stop.set)
        thread.join(60)
