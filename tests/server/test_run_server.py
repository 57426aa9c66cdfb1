"""The server's life as a process: ports, signals, the engine's death. Nothing may be left over."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.errors import ConfigError
from jaxserve.server.run import bind_socket

FAKE_SERVER = Path(__file__).parents[1] / "support" / "fake_server.py"
LONG = {"prompt": "x", "max_tokens": 1_000_000, "stream": True}


class ServerProcess:
    """A fake server in its own process."""

    def __init__(self, **options: Any) -> None:
        self.port = free_port()
        command = [sys.executable, str(FAKE_SERVER), json.dumps({"port": self.port, **options})]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.engine_pid = int(self.process.stdout.readline() or 0)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30)

    def ready(self) -> ServerProcess:
        wait_for(self.answers)
        return self

    def answers(self) -> bool:
        assert self.process.poll() is None, self.process.communicate()
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def signal(self, number: int = signal.SIGTERM) -> float:
        self.process.send_signal(number)
        return time.monotonic()

    def wait(self) -> tuple[int, str]:
        """The exit code and what was logged; the engine's process must be gone."""
        _, logged = self.process.communicate(timeout=60)
        wait_for(lambda: not alive(self.engine_pid))
        return self.process.returncode, logged


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text() if Path("/proc").exists() else True


@pytest.fixture
def start() -> Iterator[Callable[..., ServerProcess]]:
    servers: list[ServerProcess] = []

    def begin(**options: Any) -> ServerProcess:
        servers.append(ServerProcess(**options))
        return servers[-1]

    yield begin
    for server in servers:
        server.client.close()
        if server.process.poll() is None:
            os.killpg(server.process.pid, signal.SIGKILL)
            server.process.communicate()


def first_events(response: httpx.Response, count: int) -> Iterator[str]:
    lines = (line for line in response.iter_lines() if line)
    for _ in range(count):
        next(lines)
    return lines


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_stops_at_once(start, number):
    server = start(shutdown_timeout=300).ready()
    server.signal(number)
    code, logged = server.wait()  # less than that timeout
    assert code == 0, logged
    assert f"Listening on http://127.0.0.1:{server.port}" in logged
    assert "Traceback" not in logged


def test_running_streams_may_finish(start):
    server = start(shutdown_timeout=20).ready()
    with server.client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 60}) as response:
        lines = first_events(response, 2)
        server.signal()
        rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    code, logged = server.wait()
    assert code == 0, logged


@pytest.mark.parametrize("timeout", [0, 0.5])
def test_what_does_not_finish_in_time_is_aborted(start, timeout):
    server = start(shutdown_timeout=timeout).ready()
    with server.client.stream("POST", "/v1/completions", json=LONG) as response:
        lines = first_events(response, 2)
        server.signal()
        rest = list(lines)
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    code, logged = server.wait()
    assert code == 0, logged
    assert "Traceback" not in logged


def test_a_waiting_client_gets_what_there_is(start):
    server = start(shutdown_timeout=0.3).ready()
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(server.client.post("/v1/completions", json={**LONG, "stream": False}))

    thread = threading.Thread(target=ask)
    thread.start()
    wait_for(lambda: server.client.get("/load").json()["server_load"] == 1)
    time.sleep(0.2)  # a few steps
    server.signal()
    thread.join(20)
    choice = answers[0].json()["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert choice["text"].startswith("abc")
    assert server.wait()[0] == 0


def test_nothing_new_is_accepted_while_stopping(start):
    server = start(shutdown_timeout=2).ready()
    with server.client.stream("POST", "/v1/completions", json=LONG) as response:
        lines = first_events(response, 1)
        server.signal()
        wait_for(lambda: refused(server.port))
        list(lines)
    assert server.wait()[0] == 0


def refused(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) != 0


def test_a_second_signal_exits_at_once(start):
    server = start(shutdown_timeout=300).ready()
    with server.client.stream("POST", "/v1/completions", json=LONG) as response:
        lines = first_events(response, 1)
        server.signal()
        wait_for(lambda: refused(server.port))
        server.signal()
        with pytest.raises(httpx.TransportError):
            list(lines)
    code, _ = server.wait()
    assert code == 128 + signal.SIGTERM


def test_a_signal_while_loading(start):
    server = start(load_seconds=60)
    server.signal()
    code, logged = server.wait()
    assert code == 128 + signal.SIGTERM
    assert "Traceback" not in logged


def test_the_engines_death_ends_the_process(start):
    server = start(shutdown_timeout=5).ready()
    response = server.client.post("/v1/completions", json={"prompt": "die", "stream": True})
    assert '"code":503' in response.text
    code, logged = server.wait()
    assert code == 1
    assert "The engine has stopped: the core was killed" in logged


def test_a_port_in_use(start):
    first = start().ready()
    command = [sys.executable, str(FAKE_SERVER), json.dumps({"port": first.port, "load_seconds": 60})]
    second = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert second.returncode == 1
    assert second.stdout == "", "no engine may be started"
    assert second.stderr.strip() == (
        f"jaxserve serve: error: Port {first.port} on 127.0.0.1 is in use. "
        "Stop what listens there, or choose another port with --port."
    )


def test_clients_are_refused_until_the_engine_is_ready(start):
    server = start(load_seconds=1)
    assert refused(server.port)
    server.ready()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "256.1.1.1", "203.0.113.1"])
def test_an_address_that_is_not_ours(host):
    with pytest.raises(
        ConfigError, match="203.0.113.1" if host[0] == "2" and "113" in host else "not an address"
    ):
        bind_socket(host, 0)


def test_ipv6():
    try:
        sock = bind_socket("::1", 0)
    except ConfigError:
        pytest.skip("this machine has no IPv6")
    with sock:
        assert sock.family is socket.AF_INET6


def test_a_port_that_needs_rights_or_is_taken():
    with bind_socket("127.0.0.1", 0) as sock:
        sock.listen()
        with pytest.raises(ConfigError, match=r"Port \d+ on 127.0.0.1 is in use"):
            bind_socket("127.0.0.1", sock.getsockname()[1])


@pytest.mark.slow
def test_a_client_that_does_not_read_cannot_hold_the_server(start):
    server = start(shutdown_timeout=0, step_seconds=0).ready()
    body = json.dumps(LONG).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as stalled:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        stalled.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        stalled.recv(10)
        time.sleep(2)  # the socket's buffers fill up
        began = server.signal()
        code, logged = server.wait()
    assert code == 0, logged
    assert time.monotonic() - began < 15
