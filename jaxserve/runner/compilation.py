"""Getting every program ready before serving: loaded, or lowered in turn and compiled in a pool; counted afterwards.

Central idea: lowering is Python, hence one thread's work, and with a program for every shape it is what a start waits
for. So it begins before the weights are loaded, nothing else of Python's runs while it lasts (no garbage collection, no
storing of what is compiled already, which holds the interpreter for as long as lowering a program takes), and threads
that compile make way for it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxserve.runner.program_store import SETTINGS, ProgramStore, prune

logger = logging.getLogger(__name__)

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"
MOST_THREADS = 16
"""That compile; each has several more at times, and assemblers as processes."""
NICENESS = 5
"""Of the threads that compile, beside the one that lowers."""


def program_folder(directory: str | None) -> Path | None:
    """Where compiled programs are kept, or None where they can't be.

    Where JAX's own cache is switched on (``jax_compilation_cache_dir``), that one serves: a program that came out of
    it cannot be stored again.
    """
    if jax.config.jax_compilation_cache_dir:
        logger.info("Compiled programs are kept by JAX, in %s.", jax.config.jax_compilation_cache_dir)
        return None
    default = os.environ.get("JAXSERVE_CACHE_DIR") or Path.home() / ".cache" / "jaxserve"
    path = Path(directory or default) / "programs"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("Compiled programs are not kept: %s cannot be created (%s).", path, error.strerror)
        return None
    prune(path)
    return path


class CompilationCounter:
    """Counts the compilations of this process from ``start`` on. JAX listeners can't be taken back, so it is weak."""

    def __init__(self) -> None:
        self.count = 0
        self._counting = False
        reference = weakref.ref(self)

        def listener(event: str, duration: float, **_: Any) -> None:
            counter = reference()
            if counter is not None and counter._counting and event == COMPILE_EVENT:
                counter.count += 1

        jax.monitoring.register_event_duration_secs_listener(listener)

    def start(self) -> None:
        """From now on a compilation is one that should not have happened."""
        self._counting = True


class Compilation:
    """Programs in the making: one thread loads and lowers them from now on, a pool compiles them once it may.

    Whoever begins one ends it, by ``result`` or by ``cancel``.

    Args:
        lowerings: key -> a function that lowers its program; those that compile longest first.
        store: of this engine.
        progress: called with (programs ready, programs in all).
        name: what a key is called in the log and by errors.
    """

    def __init__(
        self,
        lowerings: dict[Any, Callable[[], jax.stages.Lowered]],
        store: ProgramStore,
        progress: Callable[[int, int], None] | None = None,
        name: Callable[[Any], object] = lambda key: key,
    ) -> None:
        self._lowerings, self._store, self._progress, self._name = lowerings, store, progress, name
        self._started, self._processor_seconds = time.monotonic(), _processor_seconds()
        self._lock = threading.Lock()
        self._ready = self._begun = 0
        self._may_compile, self._cancelled = threading.Event(), False
        self._num_threads = min(MOST_THREADS, os.cpu_count() or 1)
        self._pool = concurrent.futures.ThreadPoolExecutor(self._num_threads, initializer=_make_way)
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        settings = {name: getattr(jax.config, name) for name in SETTINGS}
        try:
            self._programs = self._thread.submit(self._make, settings)
        except BaseException:  # Ctrl-C: nobody could end what has begun
            self._cancelled = True
            self._may_compile.set()
            raise

    def result(self) -> dict[Any, jax.stages.Compiled]:
        """Compile, and wait until every program is ready and stored.

        Raises:
            Exception: of the first program that cannot be made, with its name in a note: so the start fails, no step.
        """
        self._may_compile.set()
        try:
            programs = self._programs.result()
        except BaseException:  # Ctrl-C waits for those that compile, not for all
            self.cancel()
            raise
        self._shut_down()
        return programs

    def cancel(self) -> None:
        """Make no further program, and wait for those that are being made."""
        self._cancelled = True
        self._may_compile.set()
        self._shut_down()

    def _shut_down(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._pool.shutdown(cancel_futures=True)

    def _make(self, settings: dict[str, Any]) -> dict[Any, jax.stages.Compiled]:
        """All programs; on the thread that lowers, with JAX's settings of the one that asked for them."""
        with contextlib.ExitStack() as stack:
            for name, value in settings.items():
                stack.enter_context(getattr(jax, name.removeprefix("jax_"))(value))
            return self._make_all()

    def _make_all(self) -> dict[Any, jax.stages.Compiled]:
        loaded = dict(zip(self._lowerings, self._pool.map(self._load, self._lowerings), strict=True))
        programs = {key: program for key, program in loaded.items() if program is not None}
        making: dict[concurrent.futures.Future[_Made], Any] = {}
        unstored: set[concurrent.futures.Future[_Made]] = set()

        def keep(done: concurrent.futures.Future[_Made]) -> None:
            unstored.discard(done)
            programs[making[done]] = self._save(making[done], done.result())

        lowering = time.thread_time()
        with _no_garbage_collection():
            for key in self._lowerings:
                if key in programs:
                    continue
                future = self._pool.submit(self._compile, key, *self._lower(key))
                making[future] = key
                unstored.add(future)
                while len(making) - self._begun > self._num_threads:  # the next one is in no hurry
                    done = next((each for each in unstored if each.done()), None)
                    if done is None:
                        break
                    keep(done)
        lowered, lowering = self._now(), time.thread_time() - lowering
        for done in concurrent.futures.as_completed(list(unstored)):
            keep(done)
        logger.debug(
            "%d programs, %d of them stored, in %.1f s; lowered until %.1f s, for %.1f s of the processor's; "
            "%.1f s of the processor's in all, on %d threads",
            len(programs), len(programs) - len(making), self._now(), lowered, lowering,
            _processor_seconds() - self._processor_seconds, self._num_threads,
        )  # fmt: skip
        return {key: programs[key] for key in self._lowerings}

    def _load(self, key: Any) -> jax.stages.Compiled | None:
        if self._cancelled:
            return None
        program = self._store.load(key)
        if program is not None:
            self._count()
        return program

    def _lower(self, key: Any) -> tuple[jax.stages.Lowered, tuple[float, float]]:
        """The program, and when it was begun and done."""
        if self._cancelled:
            raise concurrent.futures.CancelledError
        begun = self._now()
        with self._naming(key):
            return self._lowerings[key](), (begun, self._now())

    def _compile(self, key: Any, lowered: jax.stages.Lowered, when_lowered: tuple[float, float]) -> _Made:
        self._may_compile.wait()
        if self._cancelled:
            raise concurrent.futures.CancelledError
        with self._lock:
            self._begun += 1
        begun = self._now()
        with self._naming(key):
            program = lowered.compile()
        made = _Made(program, when_lowered, (begun, self._now()))
        self._count()
        return made

    def _save(self, key: Any, made: _Made) -> jax.stages.Compiled:
        begun = self._now()
        self._store.save(key, made.program)
        stages = (made.lowered, made.compiled, (begun, self._now()))
        logger.debug(
            "lowered %6.2f + %5.2f s, compiled %6.2f + %5.2f s, stored %6.2f + %5.2f s: %s",
            *(value for begin, end in stages for value in (begin, end - begin)), self._name(key),
        )  # fmt: skip
        return made.program

    def _count(self) -> None:
        with self._lock:
            self._ready += 1
            if self._progress is not None:
                self._progress(self._ready, len(self._lowerings))

    @contextlib.contextmanager
    def _naming(self, key: Any) -> Generator[None, None, None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"This program cannot be made: {self._name(key)}")
            raise

    def _now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._started


@dataclass(frozen=True)
class _Made:
    """A compiled program, and when its stages were begun and done."""

    program: jax.stages.Compiled
    lowered: tuple[float, float]
    compiled: tuple[float, float]


def _make_way() -> None:
    """Let other threads go first where there are too few processors. What this one starts does so as well."""
    if sys.platform == "linux":  # elsewhere niceness is the process's
        thread = threading.get_native_id()
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICENESS)


def _processor_seconds() -> float:
    """Of this process and of its children that have ended: assemblers are such."""
    return sum(os.times()[:4])


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A traced model is so many objects that looking through them takes a tenth of the time that making them does."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
