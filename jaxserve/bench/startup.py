"""How long ``jaxserve serve`` takes to be ready, without compiled programs and with those of an earlier start."""

from __future__ import annotations

import collections
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import jaxserve
from jaxserve.bench.offline import time_statistics
from jaxserve.errors import ConfigError, JaxserveError

POLL_SECONDS = 0.02
LOG_LINES = 20
"""Of a server that failed, how much of its log is shown."""
NOT_TAKEN = frozenset({"--host", "--port", "--uds", "--ssl-certfile", "--ssl-keyfile", "--compile-cache-dir"})
"""Where the server listens and keeps its programs is chosen here."""


def measure_startup(
    flags: Sequence[str],
    *,
    num_cold: int,
    num_warm: int,
    num_warmup: int = 0,
    timeout: float = 3600.0,
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Start servers, one after another, and end each when it is ready.

    Args:
        flags: of ``jaxserve serve``.
        num_cold: starts with an empty folder for compiled programs.
        num_warm: starts with programs that are there.
        num_warmup: starts before the warm ones, not counted.
        timeout: seconds that a start may take.
        say: where progress goes.

    Returns:
        vLLM's keys: ``avg_cold_startup_time``, ``cold_startup_times``, … and the same with ``warm``.

    Raises:
        ConfigError: a flag says where the server listens or keeps its programs.
        JaxserveError: a server ended, or is not ready in time.
    """
    for flag in flags:
        name = flag.partition("=")[0].replace("_", "-")
        if name in NOT_TAKEN:
            raise ConfigError(f"bench startup chooses address and cache folder itself: leave {name} out.")
    result: dict[str, Any] = {}
    times: dict[str, list[float]] = {"cold": [], "warm": []}
    with tempfile.TemporaryDirectory(prefix="jaxserve-startup-") as folder:
        for index in range(num_cold):
            times["cold"].append(start_once(flags, Path(folder) / f"cold-{index}", timeout))
            say(f"cold start {index + 1}: {times['cold'][-1]:.2f} s")
        # The last cold start has left its programs; without one the first warm-up does.
        cache = Path(folder) / f"cold-{max(0, num_cold - 1)}"
        for index in range(max(num_warmup, 0 if num_cold or not num_warm else 1)):
            say(f"warm-up {index + 1}: {start_once(flags, cache, timeout):.2f} s")
        for index in range(num_warm):
            times["warm"].append(start_once(flags, cache, timeout))
            say(f"warm start {index + 1}: {times['warm'][-1]:.2f} s")
    for kind, seconds in times.items():
        if seconds:
            figures = time_statistics(seconds, f"{kind}_startup_time", f"{kind}_startup_times")
            figures[f"{kind}_startup_percentiles"] = figures.pop("percentiles")
            result |= figures
            say(f"Avg {kind} startup time: {figures[f'avg_{kind}_startup_time']:.2f} seconds")
    return result


def start_once(flags: Sequence[str], cache: Path, timeout: float) -> float:
    """Seconds from starting the server's process to its first healthy answer; it is ended again.

    Args:
        flags: of ``jaxserve serve``; host and port are added.
        cache: folder of compiled programs.
        timeout: seconds that it may take.

    Raises:
        JaxserveError: it ended by itself, or is not ready in time.
    """
    port = _free_port()
    package = str(Path(jaxserve.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ,
        "JAXSERVE_CACHE_DIR": str(cache),
        "PYTHONPATH": path,
        "PYTHONUNBUFFERED": "1",
    }
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # it would be used instead
    command = [
        sys.executable,
        "-m",
        "jaxserve.cli.main",
        "serve",
        *flags,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    log: collections.deque[str] = collections.deque(maxlen=LOG_LINES)
    began = time.perf_counter()
    server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    reader = threading.Thread(target=_keep, args=(server.stderr, log), daemon=True)
    reader.start()
    try:
        while not _is_healthy(port):
            if server.poll() is not None:
                reader.join(5)
                raise JaxserveError(f"The server ended with code {server.returncode}:\n{''.join(log)}")
            if time.perf_counter() - began > timeout:
                raise JaxserveError(f"The server is not ready after {timeout:g} s:\n{''.join(log)}")
            time.sleep(POLL_SECONDS)
        return time.perf_counter() - began
    finally:
        server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(60)
        if server.poll() is None:
            server.kill()
            server.wait()


def _keep(lines: IO[str], log: collections.deque[str]) -> None:
    for line in lines:
        log.append(line)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return response.status == 200
    except (OSError, urllib.error.HTTPError):
        return False
