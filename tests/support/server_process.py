"""A ``fake_stack`` server as a child process, and what it and its children use."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import httpx

FAKE_STACK = Path(__file__).parent / "fake_stack.py"
KIB_PER_PAGE = 4


def free_port(several: int = 1) -> int:
    """A port that nobody listens on, nor on the ``several - 1`` that follow.

    Where several are needed, they lie below those that the system hands out, to tests beside this one too.
    """
    while True:
        port = 0 if several == 1 else random.randrange(20_000, 32_000)
        with contextlib.ExitStack() as held:
            try:
                for offset in range(several):
                    probe = held.enter_context(socket.socket())
                    probe.bind(("127.0.0.1", port and port + offset))
            except OSError:
                continue
            return probe.getsockname()[1] - several + 1


class ServerProcess:
    """See ``fake_stack`` for the options."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.port = free_port()
        server = {"port": self.port, "shutdown_timeout": 1.0, **options.pop("server", {})}
        command = {"model": str(model), "server": server, **options}
        # A file: a pipe that nobody empties stops the server when it is full.
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 it lives as long as the process
        self.process = subprocess.Popen(
            [sys.executable, str(FAKE_STACK), json.dumps(command)],
            stderr=self._log, text=True, start_new_session=True,
        )  # fmt: skip
        self.url = f"http://127.0.0.1:{self.port}"

    def wait_ready(self, seconds: float = 60, client: httpx.Client | None = None) -> ServerProcess:
        """Wait for /health."""
        end = time.monotonic() + seconds
        client = client or httpx.Client(base_url=self.url, timeout=5)
        while True:
            assert self.process.poll() is None, self.logged()
            assert time.monotonic() < end, "the server does not become ready"
            with contextlib.suppress(httpx.TransportError):
                if client.get("/health").status_code == 200:
                    return self
            time.sleep(0.05)

    def pids(self) -> list[int]:
        """The server's process and all below it."""
        found, queue = [], [self.process.pid]
        while queue:
            pid = queue.pop()
            found.append(pid)
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    queue += map(int, (task / "children").read_text().split())
        return found

    def rss_mib(self) -> float:
        """Resident memory of all of them."""
        pages = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * KIB_PER_PAGE / 1024

    def metrics(self) -> dict[str, float]:
        """Sums over labels of /metrics, by name."""
        values: dict[str, float] = {}
        for line in httpx.get(self.url + "/metrics", timeout=120).text.splitlines():
            if not line.startswith("#"):
                name = line.partition("{")[0].partition(" ")[0]
                values[name] = values.get(name, 0.0) + float(line.rpartition(" ")[2])
        return values

    def logged(self) -> str:
        """What the processes have logged."""
        self._log.seek(0)
        return self._log.read()

    def wait(self, seconds: float = 30) -> tuple[int, str]:
        """Wait for the end; the exit code and what was logged."""
        return self.process.wait(seconds), self.logged()

    def stop(self) -> tuple[int, str]:
        """SIGTERM, and ``wait``."""
        self.process.terminate()
        return self.wait()


@contextlib.contextmanager
def server_process(model: Path, **options: Any) -> Generator[ServerProcess, None, None]:
    """A ready server; killed in the end if it has not ended."""
    server = ServerProcess(model, **options)
    try:
        yield server.wait_ready()
    finally:
        if server.process.poll() is None:
            server.stop()
