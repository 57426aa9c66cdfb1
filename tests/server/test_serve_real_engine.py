"""``jaxserve serve`` as a user starts it, on a tiny model: the official client, metrics, and the ways it ends."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from openai import OpenAI
from tiny_checkpoints import write_tiny_checkpoint

pytestmark = pytest.mark.device

FLAGS = [
    "--max-num-seqs",
    "8",
    "--max-num-batched-tokens",
    "32",
    "--block-size",
    "8",
    "--num-gpu-blocks-override",
    "200",
]
STARTUP_SECONDS = 120


@dataclass
class Served:
    process: subprocess.Popen[str]
    url: str

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def wait(self) -> tuple[int, str]:
        """The exit code, and what it logged."""
        _, log = self.process.communicate(timeout=30)
        return self.process.returncode, log

    def core_pid(self) -> int:
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return int(children[0])


def command(model: Path, *flags: str) -> list[str]:
    return [sys.executable, "-m", "jaxserve.cli.main", "serve", str(model), "--port", "0", *FLAGS, *flags]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("serve") / "llama")


def start(model: Path, *flags: str) -> Served:
    process = subprocess.Popen(command(model, *flags), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    deadline = time.monotonic() + STARTUP_SECONDS
    for line in process.stderr:
        if found := re.search(r"http://[\d.]+:\d+", line):
            return Served(process, found[0])
        assert time.monotonic() < deadline, "the server does not become ready"
    raise AssertionError(f"the server ended with {process.wait()}")


@pytest.fixture(scope="module")
def served(model: Path) -> Iterator[Served]:
    served = start(model)
    yield served
    served.process.terminate()
    served.process.communicate(timeout=30)


def metric(served: Served, name: str) -> float:
    text = httpx.get(f"{served.url}/metrics").text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{"))


def exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until_gone(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while exists(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not exists(pid)


def test_the_official_client(served):
    client = served.client()
    name = client.models.list().data[0].id
    messages = [{"role": "user", "content": "hello"}]
    arguments = {"model": name, "messages": messages, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**arguments)
    parts = [
        chunk.choices[0].delta.content or ""
        for chunk in client.chat.completions.create(**arguments, stream=True)
        if chunk.choices
    ]
    assert "".join(parts) == whole.choices[0].message.content
    assert whole.usage.completion_tokens <= 12
    completion = client.completions.create(
        model=name,
        prompt=["one", "two"],
        max_tokens=4,
        temperature=0,
        logprobs=2,
        extra_body={"ignore_eos": True},
    )
    assert [c.index for c in completion.choices] == [0, 1]
    assert len(completion.choices[0].logprobs.tokens) == 4


@pytest.mark.parametrize("concurrency", [1, 16, 64])
def test_same_text_at_any_concurrency(served, concurrency):
    client = served.client()

    name = client.models.list().data[0].id

    def ask(i: int) -> str:
        response = client.completions.create(
            model=name, prompt=f"number {i % 8}", max_tokens=10, temperature=0
        )
        return response.choices[0].text

    with ThreadPoolExecutor(concurrency) as pool:
        texts = list(pool.map(ask, range(64)))
    assert all(texts[i] == texts[i % 8] for i in range(64))
    assert metric(served, "jaxserve:compilations_total") == 0


def test_clients_that_leave_give_everything_back(served):
    with httpx.Client() as client:
        name = client.get(f"{served.url}/v1/models").json()["data"][0]["id"]
        body = {"model": name, "prompt": "x", "max_tokens": 400, "stream": True, "ignore_eos": True}
        for _ in range(30):
            with client.stream("POST", f"{served.url}/v1/completions", json=body) as response:
                next(response.iter_lines())
    deadline = time.monotonic() + 20
    while metric(served, "jaxserve:num_requests_running") and time.monotonic() < deadline:
        served.client().completions.create(model=name, prompt="y", max_tokens=1)
    assert metric(served, "jaxserve:num_requests_running") == 0
    assert metric(served, "jaxserve:kv_cache_usage_perc") == 0


def test_sigterm_while_streaming(model):
    served = start(model, "--shutdown-timeout", "0.2")
    core = served.core_pid()
    name = served.client().models.list().data[0].id
    stream = served.client().completions.create(
        model=name, prompt="x", max_tokens=480, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    served.process.send_signal(signal.SIGTERM)
    reasons = [chunk.choices[0].finish_reason for chunk in stream if chunk.choices]
    assert reasons[-1] in ("abort", "length")
    started = time.monotonic()
    code, log = served.wait()
    assert code == 0, log
    assert time.monotonic() - started < 30
    assert "Traceback" not in log
    assert wait_until_gone(core)


@pytest.mark.parametrize("requests_first", [False, True])
def test_the_cores_death_ends_the_server(model, requests_first):
    served = start(model)
    if requests_first:
        served.client().completions.create(
            model=served.client().models.list().data[0].id, prompt="x", max_tokens=2
        )
    os.kill(served.core_pid(), signal.SIGKILL)
    code, log = served.wait()
    assert code == 1
    assert "signal 9" in log


def test_killing_the_server_ends_the_core(model):
    served = start(model)
    core = served.core_pid()
    served.process.kill()
    served.process.communicate()
    assert wait_until_gone(core)


@pytest.mark.parametrize(
    "break_it,message",
    [
        (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
        (
            lambda folder: (folder / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}'),
            "Mamba",
        ),
        (lambda folder: os.truncate(folder / "model.safetensors", 5000), "model.safetensors"),
        (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
        (lambda folder: (folder / "tokenizer.json").write_text("[]"), "tokenizer"),
    ],
)
def test_a_broken_checkpoint_is_one_clear_line(tmp_path, break_it, message):
    folder = write_tiny_checkpoint(tmp_path / "llama")
    break_it(folder)
    done = subprocess.run(command(folder), capture_output=True, text=True, timeout=STARTUP_SECONDS)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
