"""``jaxserve top``: figures between samples, a picture of 80 columns, a terminal that is left as it was."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from fake_engine import FakeEngine
from live_server import live_server

from jaxserve.cli.main import main
from jaxserve.cli.top import ENTER, LEAVE, History, Sample, parse, picture, quantile
from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app

ROOT = Path(__file__).parents[2]
METRICS = """\
# TYPE jaxserve:num_requests_running gauge
jaxserve:num_requests_running{{engine="0",model_name="m"}} {running}
# TYPE jaxserve:num_requests_waiting gauge
jaxserve:num_requests_waiting{{engine="0",model_name="m"}} 12
# TYPE jaxserve:kv_cache_usage_perc gauge
jaxserve:kv_cache_usage_perc{{engine="0",model_name="m"}} 0.5
# TYPE jaxserve:generation_tokens counter
jaxserve:generation_tokens_total{{engine="0",model_name="m"}} {tokens}
# TYPE jaxserve:time_to_first_token_seconds histogram
jaxserve:time_to_first_token_seconds_bucket{{engine="0",model_name="m",le="0.1"}} {fast}
jaxserve:time_to_first_token_seconds_bucket{{engine="0",model_name="m",le="0.2"}} {slow}
jaxserve:time_to_first_token_seconds_bucket{{engine="0",model_name="m",le="+Inf"}} {slow}
jaxserve:time_to_first_token_seconds_sum{{engine="0",model_name="m"}} 1
jaxserve:time_to_first_token_seconds_count{{engine="0",model_name="m"}} {slow}
"""


def sample(at: float, **values: int) -> Sample:
    found = parse(METRICS.format(**values))
    return Sample(at, found.values)


def test_figures_are_those_of_the_interval():
    history = History(sample(10.0, running=1, tokens=100, fast=50, slow=50))
    history.add(sample(12.0, running=3, tokens=700, fast=50, slow=60))
    text = "\n".join(picture(history, "http://x", 80, styled=False))
    assert "running 3   waiting 12" in text
    assert "output 300 " in text
    assert "50.0%" in text
    assert re.search(r"first token +150\.0 ms +190\.0 ms +199\.0 ms", text)
    assert re.search(r"end to end +- +- +-", text)
    history.add(sample(13.0, running=0, tokens=5, fast=0, slow=0))  # restarted
    assert "output 0 " in "\n".join(picture(history, "http://x", 80, styled=False))


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(columns):
    history = History(sample(0.0, running=1, tokens=0, fast=0, slow=0))
    for second in range(1, 300):
        history.add(sample(float(second), running=10**6, tokens=second * 10**7, fast=second, slow=second))
    lines = picture(
        history, "http://a-very-long-host-name.example.com:8000/" + "x" * 90, columns, styled=False
    )
    assert max(map(len, lines)) <= columns


def test_quantiles():
    assert quantile([], 0.5) is None
    assert quantile([(1.0, 0.0), (float("inf"), 0.0)], 0.5) is None
    assert quantile([(1.0, 2.0), (2.0, 4.0), (float("inf"), 4.0)], 0.75) == 1.5
    assert quantile([(1.0, 0.0), (float("inf"), 4.0)], 0.5) == 1.0


class Server:
    """A server over a FakeEngine, in a thread."""

    def __init__(self) -> None:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(30)

    async def _serve(self) -> None:
        self._stop, self._loop = asyncio.Event(), asyncio.get_running_loop()
        async with live_server(create_app(FakeEngine(), ServerConfig(), ["m"])) as self.url:
            self._ready.set()
            await self._stop.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def test_once_prints_plain_text(server, capsys):
    assert (
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 3}).status_code == 200
    )
    assert main(["top", "--url", server.url + "/v1", "--once", "--interval", "0.05"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("jaxserve top   m   http://127.0.0.1")
    assert "finished   length 1" in output
    assert "\x1b" not in output


def _listen_to_interrupts() -> None:
    """A shell that runs the tests in its background has them ignored, which children inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("end", ["q", pytest.param("SIGINT", marks=pytest.mark.slow)])
def test_a_terminal_is_left_as_it_was(server, end):
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    before = termios.tcgetattr(follower)
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    command = [sys.executable, "-m", "jaxserve.cli.main", "top", "--url", server.url, "--interval", "0.1"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
        start_new_session=True,
        preexec_fn=_listen_to_interrupts,
    )
    text = ""

    def read_until(words: str) -> None:
        nonlocal text
        end = time.monotonic() + 60
        while words not in text:
            assert time.monotonic() < end, text
            text += os.read(leader, 65536).decode(errors="replace")

    try:
        read_until("q quits")
        if end == "q":
            os.write(leader, b"xq")
        else:
            process.send_signal(signal.SIGINT)
        read_until(LEAVE)
        assert process.wait(60) == 0
        assert termios.tcgetattr(follower) == before
    finally:
        process.kill()
        os.close(leader)
        os.close(follower)
    assert text.startswith(ENTER)
    assert "Traceback" not in text
    for line in text.split("\r\n"):
        assert len(re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line)) <= 80


def test_no_server_and_no_metrics(server, capsys):
    assert main(["top", "--url", "http://127.0.0.1:9"]) == 1
    assert "No server answers" in capsys.readouterr().err
    assert main(["top", "--url", server.url + "/nowhere"]) == 1
    assert "HTTP 404" in capsys.readouterr().err
    assert main(["top", "--url", server.url + "/version?"]) == 1
    assert "no metrics of jaxserve" in capsys.readouterr().err
    assert main(["top", "--url", "http://[::1"]) == 1
    assert "No server answers" in capsys.readouterr().err
    assert main(["top", "--url", server.url, "--interval", "0"]) == 1
    assert "interval must be above 0" in capsys.readouterr().err
