"""Getting every program ready before serving: loaded, or lowered in turn and compiled in a pool; counted afterwards."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax

from jaxserve.runner.program_store import ProgramStore

logger = logging.getLogger(__name__)

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def use_persistent_cache(directory: str | None) -> Path | None:
    """Keep compiled programs on disk, however small; a folder the user set in JAX already is respected."""
    if jax.config.jax_compilation_cache_dir:
        return Path(jax.config.jax_compilation_cache_dir)
    default = os.environ.get("JAXSERVE_CACHE_DIR") or Path.home() / ".cache" / "jaxserve"
    path = Path(directory or default) / "programs"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        logger.warning("No compile cache: %s cannot be created (%s).", path, error.strerror)
        return None
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
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
) -> dict[Any, jax.stages.Compiled]:
    """Load what is stored; lower the rest on this thread (tracing is Python) while a pool compiles it, and store it.

    Args:
        lowerings: key -> a function that lowers its program.
        store: of this engine.
        progress: called with (programs ready, programs in all).
    """
    total, done, lock = len(lowerings), 0, threading.Lock()

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

    def compile_one(key: Any, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        program = lowered.compile()
        store.save(key, program)
        return ready(program)

    started = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        programs = dict(zip(lowerings, pool.map(load, lowerings), strict=True))
        missing = [key for key, program in programs.items() if program is None]
        futures = {key: pool.submit(compile_one, key, lowerings[key]()) for key in missing}
        programs |= {key: future.result() for key, future in futures.items()}
    logger.debug(
        "%d programs, %d of them stored, in %.1f s", total, total - len(missing), time.monotonic() - started
    )
    return cast("dict[Any, jax.stages.Compiled]", programs)
