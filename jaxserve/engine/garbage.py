"""Full garbage collections wait while an LLM runs requests: over all that tracing made they take tenths of a second."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Generator

NEVER = 1 << 30
_lock = threading.Lock()
_running = 0
_before = gc.get_threshold()


@contextlib.contextmanager
def no_full_collections() -> Generator[None, None, None]:
    """Collections of young objects go on; the full one that falls due meanwhile comes afterwards. Of all threads."""
    global _running, _before
    with _lock:
        _running += 1
        if _running == 1:
            _before = gc.get_threshold()
            gc.set_threshold(*_before[:2], NEVER)
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if _running == 0:
                gc.set_threshold(*_before)
