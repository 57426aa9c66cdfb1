"""RequestOutputQueue: hands one request's outputs to the task that reads them; never holds more than one."""

from __future__ import annotations

import asyncio

from jaxserve.engine.request_state import RequestState
from jaxserve.outputs import RequestOutput


class RequestOutputQueue:
    """Outputs for one reader. Everything here runs in the reader's event loop.

    Nothing is stored: an output is made of the request's state when it is read, so that all that came
    meanwhile is in it, and a slow reader cannot make memory grow beyond the text itself.
    """

    __slots__ = ("_error", "_state", "_waiter")

    def __init__(self) -> None:
        self._state: RequestState | None = None
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None

    def attach(self, state: RequestState) -> None:
        """Called once, when the request is added to the output processor."""
        self._state = state

    def notify(self) -> None:
        """Wake the reader: the request's state has changed."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def fail(self, error: BaseException) -> None:
        """End the queue with ``error``, raised to the reader after the outputs that came before."""
        if self._error is None:
            self._error = error
        self.notify()

    def get_nowait(self) -> RequestOutput | None:
        """The output that is due; None when there is nothing new.

        Raises:
            BaseException: what ``fail`` was given.
        """
        if self._state is not None and self._state.changed:
            return self._state.take()
        if self._error is not None:
            raise self._error
        return None

    async def get(self) -> RequestOutput | None:
        """Wait for the next output; None after the last one.

        Raises:
            BaseException: what ``fail`` was given.
        """
        while True:
            output = self.get_nowait()
            if output is not None:
                return output
            if self._state is not None and self._state.finished:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    def __aiter__(self) -> RequestOutputQueue:
        return self

    async def __anext__(self) -> RequestOutput:
        output = await self.get()
        if output is None:
            raise StopAsyncIteration
        return output
