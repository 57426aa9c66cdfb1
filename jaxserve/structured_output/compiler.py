"""GrammarCompiler: compiles grammars in threads, off the step loop, and remembers the last ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import numpy as np

from jaxserve.errors import InvalidRequestError
from jaxserve.structured_output.interface import CompiledGrammar, GrammarBackend, GrammarError, Matcher
from jaxserve.structured_outputs_params import StructuredOutputsParams

logger = logging.getLogger(__name__)

MAX_CACHED = 128
"""Grammars remembered."""
MAX_CACHED_SECONDS = 4.0
"""Processor time that the remembered grammars took to compile. It follows their memory: the largest take 0.2 s and
50 MB, ordinary ones some milliseconds and less than 1 MB."""
NUM_THREADS = 2
COMPILE_SECONDS = 20.0
"""A request whose grammar takes longer is refused. The thread itself cannot be stopped."""
STACK_BYTES = 256 << 20
"""Of a compiling thread: reserved addresses, not memory. A chain of thousands of references recurses as deeply, and
the size limit of a grammar allows 26,000 levels of some 3 kB."""

_Key = tuple[str, str, bool, bool, str | None]


class GrammarCompiler:
    """A cache of compiled grammars with threads behind it. Safe to use from any thread.

    Args:
        load_backend: makes the backend when it is first needed, in one of the threads. Its errors are those of every
            request.
        max_cached: grammars remembered; the least recently used goes first.
        seconds: that a grammar may take.
    """

    def __init__(
        self,
        load_backend: Callable[[], GrammarBackend],
        *,
        max_cached: int = MAX_CACHED,
        seconds: float = COMPILE_SECONDS,
    ) -> None:
        self.seconds = seconds
        self._load = load_backend
        self._max_cached = max_cached
        self._cache: OrderedDict[_Key, Future[CompiledGrammar]] = OrderedDict()
        self._cost: dict[_Key, float] = {}
        """Seconds of processor time, of those in the cache that are compiled."""
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._backend: GrammarBackend | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def backend(self) -> GrammarBackend:
        """The backend, made now if it was never needed before."""
        with self._loading:
            if self._backend is None:
                self._backend = self._load()
            return self._backend

    def submit(self, params: StructuredOutputsParams) -> Future[CompiledGrammar]:
        """The grammar of ``params``, compiled once for all requests that bring the same.

        The future raises GrammarError, or what loading the backend raised.
        """
        key: _Key = (
            params.kind, params.spec, params.disable_any_whitespace, params.disable_additional_properties,
            params.whitespace_pattern,
        )  # fmt: skip
        with self._lock:
            future = self._cache.get(key)
            if future is not None:
                self._cache.move_to_end(key)
                return future
            future = self._cache[key] = Future()
            self._evict()
            self._start_threads()
        self._work.put(lambda: self._compile(key, params, future))
        return future

    def check(self, params: StructuredOutputsParams) -> None:
        """Wait until the grammar is compiled.

        Raises:
            InvalidRequestError: it is wrong, impossible, or takes too long.
        """
        result_of(self.submit(params), params, self.seconds)

    async def check_async(self, params: StructuredOutputsParams) -> None:
        """``check``, while the event loop goes on."""
        future = self.submit(params)
        if not future.done():
            loop, done = asyncio.get_running_loop(), asyncio.Event()
            future.add_done_callback(lambda _: loop.call_soon_threadsafe(done.set))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), self.seconds)
        result_of(future, params, 0.0)

    def fill_masks(self, matchers: Sequence[Matcher], masks: np.ndarray) -> None:
        """``GrammarBackend.fill_masks``, of matchers that came from here."""
        self.backend.fill_masks(matchers, masks)

    def close(self) -> None:
        """Let the threads end; what waits is not compiled."""
        with self._lock:
            threads, self._threads = self._threads, []
        for _ in threads:
            self._work.put(None)

    def _start_threads(self) -> None:
        if self._threads:
            return
        before = threading.stack_size(STACK_BYTES)
        try:
            for index in range(NUM_THREADS):
                thread = threading.Thread(target=self._run, name=f"grammar-{index}", daemon=True)
                thread.start()
                self._threads.append(thread)
        finally:
            threading.stack_size(before)

    def _run(self) -> None:
        while (job := self._work.get()) is not None:
            job()

    def _compile(self, key: _Key, params: StructuredOutputsParams, future: Future[CompiledGrammar]) -> None:
        try:
            backend, started = self.backend, time.thread_time()
            future.set_result(backend.compile(params))
        except BaseException as error:
            future.set_exception(error)
            return
        with self._lock:
            if self._cache.get(key) is future:
                self._cost[key] = time.thread_time() - started
                self._evict()

    def _evict(self) -> None:
        """Forget the least recently used grammars beyond the limits; never the newest."""
        while len(self._cache) > 1 and (
            len(self._cache) > self._max_cached or sum(self._cost.values()) > MAX_CACHED_SECONDS
        ):
            key, _ = self._cache.popitem(last=False)
            self._cost.pop(key, None)


def result_of(
    future: Future[CompiledGrammar], params: StructuredOutputsParams, seconds: float
) -> CompiledGrammar:
    """What ``submit`` came to.

    Raises:
        InvalidRequestError: with the parameter's name as the request spelt it.
    """
    try:
        return future.result(seconds)
    except GrammarError as error:
        raise refused(params, str(error)) from None
    except FutureTimeout:
        raise refused(params, "takes too long to compile; simplify it.") from None
    except InvalidRequestError:
        raise
    except Exception:
        logger.exception("A grammar could not be compiled")
        raise refused(params, "cannot be compiled.") from None


def refused(params: StructuredOutputsParams, message: str) -> InvalidRequestError:
    """The error of a request whose grammar is at fault."""
    param = params.param_of(params.kind)
    return InvalidRequestError(f"{param} {message}", param=param)
