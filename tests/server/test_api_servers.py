"""Several API servers over one core: answers, metrics of them all, deaths and the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import ServerProcess, server_process
from tiny_checkpoints import write_tiny_checkpoint

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.server import supervisor
from jaxserve.server.run import StopSignals, bind_socket
from jaxserve.server.supervisor import CLEAN_EXIT_CODES, bind_shared, watch

pytestmark = pytest.mark.anyio

ENGINE = {"max_num_seqs": 64, "max_num_batched_tokens": 256, "max_model_len": 1024}
RUNNER = {"num_blocks": 2000}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("model") / "llama")


def servers(
    model: Path, count: int = 2, step_seconds: float = 0.001, **server: Any
) -> contextlib.AbstractContextManager[ServerProcess]:
    runner = {**RUNNER, "step_seconds": step_seconds}
    return server_process(model, server={"api_server_count": count, **server}, engine=ENGINE, runner=runner)


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[ServerProcess]:
    with servers(model) as server:
        time.sleep(0.5)  # the second one may still be starting
        yield server


async def ask(url: str, index: int) -> list[int]:
    """A connection of its own for each request: the kernel spreads connections."""
    body = {"prompt": f"{index}", "max_tokens": 1 + index, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


async def test_everybody_gets_their_own_answer(running: ServerProcess):
    before = running.metrics()
    answers = await asyncio.gather(*(ask(running.url, index) for index in range(40)))
    assert [len(answer) for answer in answers] == list(range(1, 41))
    after = {name: value - before.get(name, 0.0) for name, value in running.metrics().items()}
    assert after["jaxserve:generation_tokens_total"] == sum(range(1, 41))
    assert after["jaxserve:request_success_total"] == 40
    assert after["http_requests_total"] >= 40
    assert after["jaxserve:iteration_tokens_total_count"] > 0
    assert running.metrics()["jaxserve:num_requests_running"] == 0
    assert running.metrics()["jaxserve:cache_config_info"] == 1


@pytest.mark.slow
async def test_both_serve(running: ServerProcess):
    """By the CPU time that they take."""

    def ticks() -> list[int]:
        pids = [pid for pid in running.pids() if b"api_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert len(pids) == 2
        fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
        return [int(field[11]) + int(field[12]) for field in fields]

    before = ticks()
    for _ in range(5):
        await asyncio.gather(*(ask(running.url, index) for index in range(32)))
    assert all(after > first for first, after in zip(before, ticks()))


@pytest.mark.slow
def test_asked_to_end(model: Path):
    """A stream that still runs after the timeout ends as aborted."""
    # A step of 50 ms: the stream takes at least 50 s, however fast the machine.
    with servers(model, step_seconds=0.05, shutdown_timeout=0.5) as server:
        pids = server.pids()
        assert len(pids) == 4
        body = {"prompt": "x", "max_tokens": 1000, "stream": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=30) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            server.process.terminate()
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"abort"' in rest[-2]
        assert server.wait()[0] == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("victim", ["fake_core_process", pytest.param("api_process", marks=pytest.mark.slow)])
def test_a_death_ends_them_all(model: Path, victim: str):
    with servers(model) as server:
        pids = server.pids()
        dying = next(pid for pid in pids if victim.encode() in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(dying, signal.SIGKILL)
        code, logged = server.wait()
        assert code == 1
        assert "ended with code -9" in logged or "The engine has stopped" in logged
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_port_in_use_is_refused():
    with bind_socket("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(ConfigError, match="in use"):
            bind_shared(ServerConfig(port=taken.getsockname()[1]))


def test_a_port_that_other_servers_share_is_refused():
    with bind_shared(ServerConfig(port=0)) as first:
        first.listen()
        with pytest.raises(ConfigError, match="in use"):
            bind_shared(ServerConfig(port=first.getsockname()[1]))


class StubServer:
    """An API server that ends as it is told to.

    Args:
        ends: its exit code once it is asked to end; None never ends.
        code: its exit code so far.
    """

    def __init__(self, ends: int | None = 0, code: int | None = None) -> None:
        self.index = 1
        self.exit_code = code
        self._ends = ends

    def drain(self) -> None:
        if self.exit_code is None:
            self.exit_code = self._ends

    engine_died = drain


class StubCore:
    """A core that lives, or died before anybody listened."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    def listen(self, on_outputs: Any, on_death: Any) -> None:
        pass


def verdict(*servers: StubServer, asked: bool = True, error: Exception | None = None) -> int:
    stop = StopSignals()
    with stop.handled():
        if asked:  # while it was starting, where an exception is lost
            with contextlib.suppress(SystemExit):
                os.kill(os.getpid(), signal.SIGTERM)
        return watch(StubCore(error), servers, stop, ServerConfig(shutdown_timeout=0))  # type: ignore[arg-type]


@pytest.mark.parametrize("code", CLEAN_EXIT_CODES)
def test_servers_that_end_as_asked(code: int, caplog: pytest.LogCaptureFixture):
    """By themselves, by the signal while they start, or with the code that stands for it; also before the others."""
    assert verdict(StubServer(0), StubServer(code), StubServer(code=code)) == 0
    assert not caplog.records


@pytest.mark.parametrize("code", [1, 2, -signal.SIGKILL, 120])
def test_a_server_that_fails_at_the_end(code: int, caplog: pytest.LogCaptureFixture):
    assert verdict(StubServer(0), StubServer(code)) == 1
    assert caplog.messages == [f"API server 1 ended with code {code}."]


def test_a_server_that_does_not_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(supervisor, "END_SECONDS", 0.01)
    assert verdict(StubServer(0), StubServer(None)) == 1
    assert caplog.messages == ["API server 1 does not end; it is killed."]


@pytest.mark.parametrize("code", CLEAN_EXIT_CODES)
def test_nobody_asked_for_the_end(code: int, caplog: pytest.LogCaptureFixture):
    assert verdict(StubServer(0), StubServer(code=code), asked=False) == 1
    assert caplog.messages == [f"API server 1 ended with code {code}."]
    assert verdict(StubServer(0), asked=False, error=EngineDeadError("gone")) == 1


def test_a_second_signal_to_a_supervised_server():
    """Its group was signalled, and then its supervisor asked it: it goes on draining."""
    begun: list[bool] = []
    stop = StopSignals(second_exits=False)
    with stop.handled():
        stop.drain_with(lambda: begun.append(True))
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
    assert begun == [True]


@pytest.mark.slow
def test_a_unix_socket(model: Path, tmp_path: Path):
    path = str(tmp_path / "socket")
    server = ServerProcess(model, server={"api_server_count": 2, "uds": path}, engine=ENGINE, runner=RUNNER)
    try:
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x") as client:
            server.wait_ready(client=client)
            response = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
            assert response.json()["usage"]["completion_tokens"] == 3
    finally:
        assert server.stop()[0] == 0
