"""How long ``jaxserve serve`` takes to be ready: with an empty compile cache, then with a warm one.

    python benchmarks/startup.py

The compile cache is a temporary folder. Printed per start: the server's own log lines with the seconds since
its process was started, and when /health first answered 200. Targets on 2 cores: under 60 s with an empty
cache, under 20 s with a warm one.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import IO

from parts import import_path

TARGETS = {"empty": 60.0, "warm": 20.0}
"""Compile cache -> seconds until ready."""
POLL_SECONDS = 0.05
TIMEOUT_SECONDS = 900.0
LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \w+ ")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def print_log(lines: IO[str], started: float) -> None:
    """Every line with the time at which it came."""
    for line in lines:
        print(f"  {time.monotonic() - started:6.1f} s  {LOG_PREFIX.sub('', line.rstrip())}", flush=True)


def is_healthy(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as response:
            return response.status == 200
    except (OSError, urllib.error.HTTPError):
        return False


def measure(cache: str, flags: Sequence[str]) -> float:
    """Start a server over the compile cache ``cache``; seconds until it is healthy. It is ended again.

    Raises:
        RuntimeError: it ended by itself, or is not ready after TIMEOUT_SECONDS.
    """
    port = free_port()
    command = [sys.executable, "-m", "jaxserve.cli.main", "serve", "--port", str(port), *flags]
    environment = {
        "JAX_PLATFORMS": "cpu", **os.environ, "JAXSERVE_CACHE_DIR": cache, "PYTHONPATH": import_path(),
        "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # it would be used instead
    started = time.monotonic()
    server = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    log = threading.Thread(target=print_log, args=(server.stderr, started), daemon=True)
    log.start()
    try:
        while not is_healthy(port):
            if server.poll() is not None:
                raise RuntimeError(
                    f"The server ended with exit code {server.returncode} before it was ready."
                )
            if time.monotonic() - started > TIMEOUT_SECONDS:
                raise RuntimeError(f"The server is not ready after {TIMEOUT_SECONDS:g} s.")
            time.sleep(POLL_SECONDS)
        return time.monotonic() - started
    finally:
        server.terminate()
        server.wait(60)
        log.join(5)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Further arguments go to jaxserve serve.",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a target is missed")
    arguments, flags = parser.parse_known_args()
    met = True
    with tempfile.TemporaryDirectory(prefix="jaxserve-startup-") as cache:
        for state, target in TARGETS.items():
            print(
                f"compile cache {state}, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}",
                flush=True,
            )
            seconds = measure(cache, flags)
            verdict = "met" if seconds < target else "MISSED"
            met = met and seconds < target
            print(f"ready after {seconds:.1f} s, compile cache {state} (target: < {target:g} s): {verdict}\n")
    return 0 if met or not arguments.check else 1


if __name__ == "__main__":
    sys.exit(main())
