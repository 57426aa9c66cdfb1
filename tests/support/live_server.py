"""The application behind a real socket, in the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import uvicorn
from fastapi import FastAPI

from jaxserve.server.run import Server, bind_socket


@contextlib.asynccontextmanager
async def live_server(app: FastAPI) -> AsyncIterator[str]:
    """Serve ``app`` meanwhile; the base URL."""
    sock = bind_socket("127.0.0.1", 0)
    port = sock.getsockname()[1]
    server = Server(
        uvicorn.Config(app, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1)
    )
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        await until(lambda: server.started)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for ``condition`` to hold."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)
