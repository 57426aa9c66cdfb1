"""An application behind a real socket, in a thread of its own: for what blocks while it talks to a server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

from fastapi import FastAPI
from live_server import live_server


@contextlib.contextmanager
def threaded_server(make_app: Callable[[], FastAPI]) -> Iterator[str]:
    """Serve what ``make_app`` returns; the base URL."""
    started, urls = threading.Event(), list[str]()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        async with live_server(make_app()) as url:
            urls.append(url)
            started.set()
            await stop.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        finally:
            started.set()
            loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    started.wait(60)
    try:
        assert urls, "the server did not start"
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)
