"""Getting every program ready before serving: loaded, or lowered in turn and compiled in a pool; counted afterwards."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, cast

import jax

from jaxserve.runner.program_store import ProgramStore, prune

logger = logging.getLogger(__name__)

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


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


def compile_all(
    lowerings: dict[Any, Callable[[], jax.stages.Lowered]],
    store: ProgramStore,
    progress: Callable[[int, int], None] | None = None,
    name: Callable[[Any], object] = lambda key: key,
) -> dict[Any, jax.stages.Compiled]:
    """Load what is stored; lower the rest on this thread (tracing is Python) while a pool compiles it, and store it.

    Args:
        lowerings: key -> a function that lowers its program.
        store: of this engine.
        progress: called with (programs ready, programs in all).
        name: what a key is called in the log and by errors.

    Raises:
        Exception: of the first program that cannot be made, with its name in a note: so the start fails, no step.
    """
    total, done, lock = len(lowerings), 0, threading.Lock()

    @contextlib.contextmanager
    def naming(key: Any) -> Generator[None, None, None]:
        try:
            yield
        except Exception as error:
            error.add_note(f"This program cannot be made: {name(key)}")
            raise

    def ready(program: jax.stages.Compiled) -> jax.stages.Compiled:
        nonlocal done
        with lock:
            done += 1
            if progress is not None:
                progress(done, total)
        return program

    def load(key: Any) -> jax.stages.Compiled | None:
        program = store.load(key)
        return program if program is None else ready(program)

    def compile_one(key: Any, lowered: jax.stages.Lowered, lowered_in: float) -> jax.stages.Compiled:
        began = time.monotonic()
        with naming(key):
            program = lowered.compile()
        compiled = time.monotonic()
        store.save(key, program)
        logger.debug(
            "%5.2f s to lower, %6.2f s to compile, %5.2f s to store, done at %6.2f s: %s",
            lowered_in, compiled - began, time.monotonic() - compiled, time.monotonic() - started, name(key),
        )  # fmt: skip
        return ready(program)

    def lower_one(key: Any) -> tuple[jax.stages.Lowered, float]:
        began = time.monotonic()
        with naming(key):
            return lowerings[key](), time.monotonic() - began

    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        try:
            programs = dict(zip(lowerings, pool.map(load, lowerings), strict=True))
            missing = [key for key, program in programs.items() if program is None]
            futures = {key: pool.submit(compile_one, key, *lower_one(key)) for key in missing}
            programs |= {key: future.result() for key, future in futures.items()}
        except BaseException:  # Ctrl-C waits for those that compile, not for all
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    logger.debug(
        "%d programs, %d of them stored, in %.1f s", total, total - len(missing), time.monotonic() - started
    )
    return cast("dict[Any, jax.stages.Compiled]", programs)
