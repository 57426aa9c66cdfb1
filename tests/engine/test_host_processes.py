"""Two and four processes as hosts of one engine (CPU, gloo): one process's tokens, and how all of them end together."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_process import free_port
from tiny_checkpoints import write_tiny_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.device, pytest.mark.timeout(900)]

WAIT_SECONDS = 400
FLAGS = (
    "--max-num-seqs 4 --max-num-batched-tokens 8 --max-model-len 128 --block-size 8 --num-gpu-blocks-override 100 "
    "--enforce-no-compile"
)
REQUESTS: list[dict[str, Any]] = [
    *({"prompt": f"{word} is a word", "temperature": 0} for word in ("house", "tree", "a long road", "b")),
    {"prompt": "house is a word", "temperature": 1.0, "seed": 5, "top_p": 0.9, "logit_bias": {"7": 2.0}},
    {"prompt": "tree is a word", "temperature": 0.8, "seed": 6, "repetition_penalty": 1.2, "logprobs": 2},
    {"prompt": "Letters:", "temperature": 0, "structured_outputs": {"regex": "[xyz]{6}"}},
]


class Engine:
    """``jaxserve serve`` with ``size`` processes."""

    def __init__(self, model: Path, size: int, coordinator: int) -> None:
        self.logs = [tempfile.TemporaryFile("w+") for _ in range(size)]  # noqa: SIM115 they live as long as this
        self.processes = [
            subprocess.Popen(
                self._command(model, size, rank, coordinator),
                stderr=self.logs[rank],
                text=True,
                env={**os.environ, "XLA_FLAGS": ""},  # one device each
            )
            for rank in reversed(range(size))
        ][::-1]
        self.url = ""

    def _command(self, model: Path, size: int, rank: int, coordinator: int) -> list[str]:
        words = [
            sys.executable,
            "-m",
            "jaxserve.cli.main",
            "serve",
            str(model),
            "--port",
            "0",
            *FLAGS.split(),
        ]
        if size > 1:
            words += (
                f"-tp {size} --nnodes {size} --node-rank {rank} --coordinator 127.0.0.1:{coordinator}".split()
            )
        return words

    def logged(self, rank: int = 0) -> str:
        self.logs[rank].seek(0)
        return self.logs[rank].read()

    def wait_ready(self) -> None:
        self.until(lambda: "Listening" in self.logged())
        found = re.search(r"http://[\d.]+:\d+", self.logged())
        assert found is not None
        self.url = found[0]

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < end, [self.logged(rank)[-3000:] for rank in range(len(self.logs))]
            assert self.processes[0].poll() is None, self.logged()
            time.sleep(0.05)

    def answers(self) -> list[Any]:
        """What each request samples, all of them at once."""

        def ask(fields: dict[str, Any]) -> Any:
            body = {"max_tokens": 16, "ignore_eos": "structured_outputs" not in fields, **fields}
            answer = httpx.post(self.url + "/v1/completions", json=body, timeout=WAIT_SECONDS)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        with ThreadPoolExecutor(len(REQUESTS)) as pool:
            return list(pool.map(ask, REQUESTS))

    def codes(self, seconds: float) -> list[int]:
        """Exit codes of all, which end within ``seconds``."""
        end = time.monotonic() + seconds
        return [process.wait(max(0.1, end - time.monotonic())) for process in self.processes]


@contextmanager
def engine(model: Path, size: int, coordinator: int = 0) -> Iterator[Engine]:
    running = Engine(model, size, coordinator)
    try:
        running.wait_ready()
        yield running
    finally:
        for process in running.processes:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("hosts") / "llama", num_hidden_layers=1)


@pytest.fixture(scope="module")
def coordinator() -> int:
    return free_port(2)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[Any]:
    with engine(model, 1) as alone:
        return alone.answers()


def test_two_hosts_say_what_one_says_and_end_together_when_one_is_killed(
    model: Path, coordinator: int, expected: list[Any]
) -> None:
    assert re.fullmatch("[xyz]{6}", expected[-1])
    with engine(model, 2, coordinator) as pair:
        assert pair.answers() == expected
        body = {"prompt": "x", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", pair.url + "/v1/completions", json=body, timeout=WAIT_SECONDS) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: {")
            os.kill(pair.processes[1].pid, signal.SIGKILL)
            rest = "\n".join(lines)
        assert '"error"' in rest
        assert pair.codes(30) == [1, -signal.SIGKILL]
        assert "Host 1 (127.0.0.1) is gone" in pair.logged() or "A step failed" in pair.logged()


def test_four_hosts_start_after_a_death_and_end_cleanly(
    model: Path, coordinator: int, expected: list[Any]
) -> None:
    with engine(model, 4, coordinator) as four:
        assert four.answers() == expected
        for process in four.processes:
            process.send_signal(signal.SIGTERM)
        assert four.codes(120) == [0, 0, 0, 0], [four.logged(rank)[-2000:] for rank in range(4)]
