"""Parts of a benchmark, one after another: one that fails or takes too long costs only itself, and each is saved."""

from __future__ import annotations

import _thread
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).parents[1])
sys.path.insert(0, ROOT)  # scripts run without an installation
sys.path.append(f"{ROOT}/tests/support")

GRACE = 20.0
"""Seconds that a part has to end in after its limit; then the process ends, and what was saved remains."""


class Parts:
    """Runs parts in this thread, the main one, and keeps what they return.

    At its limit a part is interrupted as by Ctrl-C: an engine notices between two steps, aborts what runs and can be
    used again. A part that waits for a device that hangs notices nothing: after ``GRACE`` seconds the stacks are
    printed and the process ends with code 3.

    Args:
        save: a file for ``results`` as JSON, written after every part.
        limit: seconds of a part that has no limit of its own.
    """

    def __init__(self, save: Path | None = None, limit: float = 120.0) -> None:
        self.results: dict[str, Any] = {}
        """Name -> what the part returned; ``{"error": ...}`` of one that failed."""
        self.failed: list[str] = []
        self._save, self._limit = save, limit
        if (
            signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        ):  # as a shell starts what it leaves in the background
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def run(self, name: str, function: Callable[..., Any], *args: Any, limit: float | None = None) -> Any:
        """What ``function`` returns, or None if it failed; prints how long it took, or why it failed."""
        limit, began, clock = limit or self._limit, time.monotonic(), _Clock()
        timers = [threading.Timer(limit, clock.interrupt), threading.Timer(limit + GRACE, _end, [name])]
        for timer in timers:
            timer.daemon = True
            timer.start()
        result: Any = None
        try:
            result = function(*args)
            clock.stop()
            self.results[name] = result
        except KeyboardInterrupt:
            if not clock.late:
                raise
            result = None
            self._note(name, f"stopped after {limit:.0f} s")
        except Exception as error:
            traceback.print_exc(limit=-8)
            self._note(name, f"{type(error).__name__}: {str(error)[:300]}")
        finally:
            for timer in timers:
                timer.cancel()
            self.save()
        print(f"# {name}: {time.monotonic() - began:.1f} s", flush=True)
        return result

    def _note(self, name: str, error: str) -> None:
        self.failed.append(name)
        self.results[name] = {"error": error}
        print(f"{name}: FAILED, {error}", flush=True)

    def save(self) -> None:
        if self._save is not None:
            self._save.write_text(json.dumps(self.results, indent=1))

    def end(self) -> int:
        """The exit code; names what failed."""
        if self.failed:
            print(f"FAILED: {', '.join(self.failed)}", flush=True)
        return int(bool(self.failed))


def import_path() -> str:
    """PYTHONPATH of a process that runs the package: without an installation, and with what this one was given."""
    return os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))


def clean_up_when_ended() -> None:
    """Let SIGTERM, by which time limits end a script, leave as an exception does: its processes are ended, too."""

    def leave(number: int, frame: Any) -> None:
        del number, frame
        sys.exit(143)

    signal.signal(signal.SIGTERM, leave)


def verdict(value: float, target: float, *, least: bool = False) -> str:
    """``target T met`` or ``target T MISSED``; ``least``: large values are good."""
    met = value >= target if least else value <= target
    return f"target {target:g} {'met' if met else 'MISSED'}"


class _Clock:
    """Interrupts the main thread, unless it was stopped before."""

    def __init__(self) -> None:
        self._lock, self._stopped, self.late = threading.Lock(), False, False

    def interrupt(self) -> None:
        with self._lock:
            if not self._stopped:
                self.late = True
                _thread.interrupt_main()

    def stop(self) -> None:
        with self._lock:
            self._stopped = True


def _end(name: str) -> None:
    print(f"{name}: FAILED, hangs; the process ends", flush=True)
    faulthandler.dump_traceback(sys.stderr, all_threads=True)
    sys.stderr.flush()
    os._exit(3)
