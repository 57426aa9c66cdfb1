"""chat, complete and collect-env, against a server over a FakeEngine."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_engine import FakeEngine
from live_server import live_server

from jaxserve.cli import collect_env
from jaxserve.cli.main import main
from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app

ROOT = Path(__file__).parents[2]
KEY = "sk-test"


class BackgroundServer:
    """A server in a thread."""

    def __init__(self) -> None:
        self.engine = FakeEngine(max_model_len=1 << 20, step_seconds=0.001)
        self.url = ""
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(20)

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        async with live_server(create_app(self.engine, ServerConfig(api_key=[KEY]), ["m"])) as url:
            self.url = f"{url}/v1"
            self._ready.set()
            await self._stop.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(20)


@pytest.fixture
def server(monkeypatch) -> Iterator[BackgroundServer]:
    monkeypatch.setenv("JAXSERVE_API_KEY", KEY)
    server = BackgroundServer()
    yield server
    server.close()


def test_quick_chat(server, capsys):
    arguments = ["chat", "--url", server.url, "-q", "hi", "--max-tokens", "5", "--system-prompt", "be brief"]
    assert main(arguments) == 0
    assert capsys.readouterr().out == "abcde\n"
    assert server.engine.admitted[0].prompt == "<system>be brief\n<user>hi\n<assistant>"


def test_quick_completion(server, capsys):
    assert main(["complete", "--url", server.url + "/", "--quick", "hi", "--max_tokens=3"]) == 0
    assert capsys.readouterr().out == "abc\n"
    assert server.engine.admitted[0].prompt == "hi"


def test_a_conversation_is_remembered(server, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\n\nsecond\n"))
    assert main(["chat", "--url", server.url, "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "ab\nab\n"
    assert [request.prompt for request in server.engine.admitted] == [
        "<user>first\n<assistant>",
        "<user>first\n<assistant>ab\n<user>second\n<assistant>",
    ]


def test_completions_line_by_line(server, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert main(["complete", "--url", server.url, "--max-tokens", "2"]) == 0
    assert capsys.readouterr().out == "ab\nab\n"
    assert [request.prompt for request in server.engine.admitted] == ["one", "two"]


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_control_c_stops_the_answer(server, command):
    arguments = [command, "--url", server.url, "-q", "x", "--max-tokens", "1000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxserve.cli.main", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, text=True,
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.read(3) == "abc"
    process.send_signal(signal.SIGINT)
    _, logged = process.communicate(timeout=20)
    assert (process.returncode, logged) == (130, "")
    deadline = threading.Event()
    for _ in range(3000):
        if server.engine.aborted:
            break
        deadline.wait(0.02)
    assert len(server.engine.aborted) == 1


def test_what_the_server_refuses(server, capsys, monkeypatch):
    assert main(["chat", "--url", server.url, "-q", "hi", "--model-name", "other"]) == 1
    assert "The model `other` does not exist" in capsys.readouterr().err
    assert main(["complete", "--url", server.url, "-q", "fail"]) == 1
    assert "A step failed" in capsys.readouterr().err
    monkeypatch.setenv("JAXSERVE_API_KEY", "wrong")
    assert main(["chat", "--url", server.url, "-q", "hi"]) == 1
    assert "API key" in capsys.readouterr().err
    assert main(["chat", "--url", server.url, "-q", "hi", "--api-key", KEY, "--max-tokens", "1"]) == 0


@pytest.mark.parametrize(
    "url, reason",
    [
        ("http://127.0.0.1:9/v1", "No server answers"),
        ("nonsense", "failed"),
        ("http://[", "No server answers"),
    ],
)
def test_no_server(url, reason, capsys):
    assert main(["chat", "--url", url, "-q", "hi"]) == 1
    message = capsys.readouterr().err
    assert message.startswith("jaxserve chat: error: ")
    assert reason in message
    assert message.count("\n") == 1


def test_a_server_that_is_none_of_ours(server, capsys):
    assert main(["chat", "--url", server.url.removesuffix("/v1") + "/health", "-q", "hi"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


# --- collect-env ------------------------------------------------------------------------------------------


def test_collect_env(capsys, monkeypatch):
    monkeypatch.setattr(collect_env, "devices", lambda: ["cpu cpu"])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["collect-env"]) == 0
    out = capsys.readouterr().out
    for title in ("jaxserve:", "python:", "machine:", "packages:", "devices:", "environment:"):
        assert title in out.splitlines()
    assert "  JAX_PLATFORMS=cpu" in out.splitlines()
    assert "  cpu cpu" in out.splitlines()


def test_secrets_are_not_shown():
    variables = {"JAXSERVE_API_KEY": "a", "HF_TOKEN": "b", "JAX_SECRET": "c", "XLA_FLAGS": "d", "HOME": "e"}
    assert collect_env.environment(variables.items()) == ["XLA_FLAGS=d"]


def test_what_cannot_be_asked_says_so(monkeypatch):
    monkeypatch.setattr(collect_env, "DEVICES_PROGRAM", "raise RuntimeError('no device')")
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    assert collect_env.devices() == ["failed: RuntimeError: no device"]
