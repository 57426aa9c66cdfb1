"""A local Ray cluster with two replicas of SmolLM2: the openai client, shared prefixes, a replica's sudden death."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest
from server_process import free_port

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs the ray extra"),
]

MODEL = "SmolLM2-135M-Instruct"
FLAGS = (
    "--replicas 2 --cpus-per-replica 0.5 --max-model-len 512 --max-num-seqs 4 --max-num-batched-tokens 8 "
    "--kv-cache-memory-bytes 64M"
)
WAIT_SECONDS = 600


class Cluster:
    """``jaxserve serve-ray`` as a user starts it."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 it lives as long as the process
        environment = {
            "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_DEDUP_LOGS": "0", "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(sys.path), "RAY_TMPDIR": str(folder),
        }  # fmt: skip
        os.environ.get("JAXSERVE_CACHE_DIR") or environment.update(JAXSERVE_CACHE_DIR=str(folder / "cache"))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "jaxserve.cli.main", "serve-ray", "--port", str(port), *FLAGS.split()],
            env={**os.environ, **environment}, stdout=self._log, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip

    def wait_ready(self) -> None:
        self.until(lambda: "Listening on" in self.logged())

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert self.process.poll() is None, self.logged()[-5000:]
            assert time.monotonic() < end, self.logged()[-5000:]
            time.sleep(0.1)

    def logged(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def replicas(self) -> list[int]:
        """Process ids of the engines' actors."""
        found, queue = [], [self.process.pid]
        while queue:
            pid = queue.pop()
            with contextlib.suppress(OSError):
                if b"EngineReplica" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
                for task in Path(f"/proc/{pid}/task").iterdir():
                    queue += map(int, (task / "children").read_text().split())
        return found

    def metric(self, name: str) -> dict[str, float]:
        """A metric's value, by replica."""
        text = httpx.get(self.url + "/metrics", timeout=60).text
        pattern = rf'^jaxserve:{name}{{replica="(\w+)",.*}} (\S+)$'
        values: dict[str, float] = {}
        for replica, value in re.findall(pattern, text, re.MULTILINE):
            values[replica] = values.get(replica, 0.0) + float(value)
        return values

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="x", max_retries=0, timeout=WAIT_SECONDS)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    # Not pytest's folder: paths of Unix sockets are short.
    with tempfile.TemporaryDirectory(prefix="r", ignore_cleanup_errors=True) as folder:
        cluster = Cluster(Path(folder))
        try:
            cluster.wait_ready()
            yield cluster
            cluster.process.send_signal(signal.SIGTERM)
            assert cluster.process.wait(120) == 0
        finally:
            cluster.process.kill()


def test_the_openai_client_is_served(cluster: Cluster) -> None:
    async def ask() -> None:
        client = cluster.client()
        messages = [{"role": "user", "content": "Say hello."}]
        raw = await client.chat.completions.with_raw_response.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=6
        )
        assert len(raw.headers.get_list("x-request-id")) == 1
        whole = raw.parse().choices[0].message.content
        stream = await client.chat.completions.create(
            model=MODEL, messages=messages, temperature=0, max_tokens=6, stream=True
        )
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream]
        assert len(pieces) > 2
        assert "".join(pieces) == whole
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(model=MODEL, messages=messages, temperature=-1)

    asyncio.run(ask())
    assert httpx.get(cluster.url + "/health", timeout=60).status_code == 200
    assert len(cluster.metric("num_requests_running")) == 2


def test_shared_prefixes_go_to_the_replica_that_has_them(cluster: Cluster) -> None:
    async def ask(prompt: str) -> None:
        await cluster.client().completions.create(model=MODEL, prompt=prompt, max_tokens=1)

    served: set[str] = set()
    family = 0
    while family < 2 or len(served) < 2:
        family += 1
        assert family < 20, "new prompts are not spread over idle replicas"
        # Several blocks of the router's 256 bytes and of the cache's 32 tokens.
        shared = f"Document {family}. " + "The quick brown fox jumps over the lazy dog. " * 13
        before, hits_before = (
            cluster.metric("request_success_total"),
            cluster.metric("prefix_cache_hits_total"),
        )
        for question in range(3):
            asyncio.run(ask(f"{shared} Question {question}?"))
        after, hits = cluster.metric("request_success_total"), cluster.metric("prefix_cache_hits_total")
        gained = {replica: after[replica] - before.get(replica, 0) for replica in after}
        assert sorted(gained.values()) == [0, 3], (family, gained)
        home = max(gained, key=lambda replica: gained[replica])
        assert hits[home] - hits_before.get(home, 0) >= 2 * 96
        served.add(home)


def test_a_killed_replica_loses_no_request_that_had_not_begun_and_is_replaced(cluster: Cluster) -> None:
    before = set(cluster.metric("num_requests_running"))
    victim = cluster.replicas()[0]

    async def whole(client: openai.AsyncOpenAI, number: int) -> int:
        answer = await client.completions.create(
            model=MODEL, prompt=f"{number} is", max_tokens=32, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens

    async def streamed(client: openai.AsyncOpenAI, number: int) -> tuple[int, str]:
        """Chunks, and how it ended."""
        chunks = 0
        try:
            stream = await client.completions.create(
                model=MODEL,
                prompt=f"{number} is",
                max_tokens=32,
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async for _ in stream:
                chunks += 1
        except openai.APIError as error:
            return chunks, error.message
        return chunks, "complete"

    async def load() -> tuple[list[int], list[tuple[int, str]]]:
        client = cluster.client()
        tasks = [asyncio.create_task(whole(client, number)) for number in range(10)]
        streams = [asyncio.create_task(streamed(client, number)) for number in range(10, 16)]
        while min((await asyncio.to_thread(cluster.metric, "num_requests_running")).values()) < 4:
            await asyncio.sleep(0.05)
        os.kill(victim, signal.SIGKILL)
        return await asyncio.gather(*tasks), await asyncio.gather(*streams)

    counts, streams = asyncio.run(load())
    assert counts == [32] * 10
    for chunks, end in streams:
        assert end == "complete" or (chunks > 0 and "has died" in end), (chunks, end)
    assert "died before it answered a request: another one gets it" in cluster.logged()
    # Serve makes another one.
    cluster.until(lambda: len(set(cluster.metric("num_requests_running")) - before) == 1)
    assert len(cluster.metric("num_requests_running")) == 2
    assert victim not in cluster.replicas()
