"""Requests made from the server's own OpenAPI document: no 5xx, answers as declared, and a server that stays well."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx
import pytest
from fake_engine import FakeEngine
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from live_server import live_server
from test_serve_real_engine import metric, start
from tiny_checkpoints import write_tiny_checkpoint

from jaxserve.config import ServerConfig
from jaxserve.server.app import create_app

schemathesis: Any = pytest.importorskip("schemathesis")
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.generation import GenerationMode  # noqa: E402
from schemathesis.specs.openapi.checks import (  # noqa: E402
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
SETTINGS: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "derandomize": True,  # what CI says depends on the code alone
    "phases": [Phase.generate],
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
}
NEEDED = frozenset({"prompt", "messages", "input", "token_ids", "tokens"})
"""Without these a request asks for nothing."""


class ServerThread:
    """A server over a FakeEngine in a thread of its own."""

    def __init__(self) -> None:
        self.url = ""
        self.engine: FakeEngine | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._ready.wait(30)

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.engine = FakeEngine(max_model_len=200)
        app = create_app(self.engine, ServerConfig(max_n=8), ["m"])
        async with live_server(app) as self.url:
            self._ready.set()
            await self._stop.wait()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    server = ServerThread()
    yield server
    server.stop()


def fuzz(url: str, examples: int) -> Counter[int]:
    """Send every operation ``examples`` valid and as many invalid requests, and parts of them.

    Returns:
        How often each status came back.
    """
    statuses: Counter[int] = Counter()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    with httpx.Client(base_url=url) as client:
        for result in schema.get_all_operations():
            for mode in GenerationMode:
                strategy = result.ok().as_strategy(generation_mode=mode)

                @settings(max_examples=examples, **SETTINGS)
                @given(case=strategy, random=st.randoms(use_true_random=False))
                def attempt(case: Any, random: Random) -> None:
                    for part in parts(case, random, client):
                        response = part.call_and_validate(checks=CHECKS, timeout=30)
                        statuses[response.status_code] += 1

                with contextlib.suppress(Unsatisfiable):  # some operations take nothing that could be wrong
                    attempt()
    return statuses


def parts(case: Any, random: Random, client: httpx.Client) -> Iterator[Any]:
    """The request, and the same with few of its fields: among all of them one is nearly always refused."""
    yield case
    if case.path_parameters and "response_id" in case.path_parameters:
        made = client.post("/v1/responses", json={"input": "x", "max_output_tokens": 1})
        case.path_parameters["response_id"] = made.json()["id"]
        yield case
    if isinstance(case.body, dict):
        whole = case.body
        for share in (0.1, 0.1, 0.2, 0.4):
            case.body = {
                name: value for name, value in whole.items() if name in NEEDED or random.random() < share
            }
            yield case


def test_some_of_everything(server: ServerThread):
    assert fuzz(server.url, 2)[200] > 10


@pytest.mark.slow
def test_thousands(server: ServerThread):
    statuses = fuzz(server.url, 25)
    assert statuses.total() > 2000
    assert statuses[200] > 200


@pytest.mark.slow
def test_the_real_engine(tmp_path: Path):
    served = start(write_tiny_checkpoint(tmp_path / "llama"), "--max-model-len", "96", "--max-n", "4")
    try:
        assert fuzz(served.url, 2)[200] > 10
        assert httpx.get(f"{served.url}/health").status_code == 200
        name = httpx.get(f"{served.url}/v1/models").json()["data"][0]["id"]
        body = {"model": name, "prompt": "x", "max_tokens": 2, "ignore_eos": True}
        answer = httpx.post(f"{served.url}/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 2
        assert_protocols_agree(served.url)
        for gauge in ("jaxserve:num_requests_running", "jaxserve:kv_cache_usage_perc"):
            assert metric(served, gauge) == 0
        assert metric(served, "jaxserve:compilations_total") == 0
    finally:
        served.process.terminate()
    code, log = served.wait()
    assert code == 0
    assert "Traceback" not in log


def assert_protocols_agree(url: str) -> None:
    """64 at once over three protocols, streamed and not: one question has one answer."""
    hello = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}

    def ask(index: int) -> str:
        match index % 4:
            case 0:
                answer = httpx.post(
                    f"{url}/v1/chat/completions", json={**hello, "max_tokens": 12}, timeout=60
                )
                return answer.json()["choices"][0]["message"]["content"]
            case 1:
                answer = httpx.post(f"{url}/v1/messages", json={**hello, "max_tokens": 12}, timeout=60)
                return answer.json()["content"][0]["text"]
            case 2:
                body = {"input": "hello", "temperature": 0, "max_output_tokens": 12}
                answer = httpx.post(f"{url}/v1/responses", json=body, timeout=60)
                return answer.json()["output"][0]["content"][0]["text"]
            case _:
                body = {**hello, "max_tokens": 12, "stream": True}
                answer = httpx.post(f"{url}/v1/messages", json=body, timeout=60)
                lines = [
                    line.removeprefix("data: ") for line in answer.text.splitlines() if "text_delta" in line
                ]
                return "".join(json.loads(line)["delta"]["text"] for line in lines)

    with ThreadPoolExecutor(64) as pool:
        assert len(set(pool.map(ask, range(64)))) == 1


def test_the_server_is_well_afterwards(server: ServerThread):
    """After the tests above."""
    answer = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert answer.json()["choices"][0]["text"] == "ab"
    assert httpx.get(f"{server.url}/health").status_code == 200
    assert server.engine.num_running == 0
