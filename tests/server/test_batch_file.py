"""Batch files: answers in the input's order, mistakes line by line, runs that are cut short and go on."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine

from jaxserve.config import ServerConfig
from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.server.app import create_app
from jaxserve.server.batch_file import BatchCounts, run_batch_file

pytestmark = pytest.mark.anyio

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def request(custom_id: str, url: str = TEXT, **body: Any) -> dict[str, Any]:
    prompt = {"prompt": "hello"} if url == TEXT else {"messages": [{"role": "user", "content": "hello"}]}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**prompt, "max_tokens": 2, **body}}


class Files:
    def __init__(self, folder: Path) -> None:
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.engine = FakeEngine()

    def write(self, *lines: dict[str, Any] | str) -> None:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        self.source.write_text("".join(text + "\n" for text in texts))

    async def run(self, **options: Any) -> BatchCounts:
        app = create_app(self.engine, ServerConfig(), ["m"])
        return await run_batch_file(app, self.source, self.target, **options)

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.target.read_text().splitlines()]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def test_answers_stand_in_the_inputs_order(files: Files):
    lengths = [30, 1, 20, 3, 10]
    files.write(*(request(f"r{i}", (TEXT, CHAT)[i % 2], max_tokens=n) for i, n in enumerate(lengths)))
    counts = await files.run()
    assert (counts.completed, counts.failed, counts.skipped) == (5, 0, 0)
    answers = files.answers()
    assert [answer["custom_id"] for answer in answers] == [f"r{i}" for i in range(5)]
    assert [a["response"]["body"]["usage"]["completion_tokens"] for a in answers] == lengths
    assert {answer["error"] for answer in answers} == {None}
    assert len({answer["id"] for answer in answers}) == 5
    assert all(answer["response"]["request_id"] for answer in answers)


async def test_mistakes_are_the_lines_own(files: Files):
    files.write(
        request("good"),
        request("refused", temperature=9),
        "{broken",
        "[]",
        {"url": TEXT},
        request("where", "/v1/embeddings"),
        {**request("how"), "method": "GET"},
        {**request("what"), "body": 3},
        {**request("more"), "extra": 1},
        request("streams", stream=True),
        request("good", max_tokens=9),
        request("other model", model="x"),
    )
    counts = await files.run()
    assert (counts.completed, counts.failed) == (1, 11)
    answers = files.answers()
    assert [answer["custom_id"] for answer in answers] == [
        "good", "refused", None, None, None, "where", "how", "what", "more", "streams", "good", "other model"
    ]  # fmt: skip
    assert answers[1]["response"]["status_code"] == 400
    assert answers[1]["response"]["body"]["error"]["param"] == "temperature"
    assert answers[11]["response"]["status_code"] == 404
    for answer in answers[2:11]:
        assert answer["response"] is None
        assert answer["error"]["code"] == "invalid_line"
        assert answer["error"]["message"]


async def test_a_second_run_asks_only_what_is_missing(files: Files):
    files.write(request("a"), request("b"))
    await files.run()
    kept = files.target.read_text().splitlines()
    files.write(request("c"), request("b"), request("a"))
    with files.target.open("a") as file:
        file.write('{"custom_id": "c", "resp')  # cut off in the middle of a line
    counts = await files.run()
    assert (counts.completed, counts.skipped) == (1, 2)
    lines = files.target.read_text().splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == ["c", "b", "a"]
    assert lines[1:] == kept[::-1]
    assert len(files.engine.admitted) == 3


async def test_failures_of_the_server_are_asked_again(files: Files):
    files.write(request("a", prompt="fail", max_tokens=9), request("b"))
    assert (await files.run()).failed == 1
    assert files.answers()[0]["response"]["status_code"] == 500
    files.write(request("a"), request("b"))
    counts = await files.run()
    assert (counts.completed, counts.skipped) == (1, 1)
    assert [answer["response"]["status_code"] for answer in files.answers()] == [200, 200]


async def test_no_more_than_so_many_at_once(files: Files):
    files.write(*(request(f"r{i}", max_tokens=5) for i in range(20)))
    task = asyncio.ensure_future(files.run(max_concurrency=3))
    most = 0
    while not task.done():
        most = max(most, files.engine.num_running)
        await asyncio.sleep(0)
    assert (await task).completed == 20
    assert most == 3


async def test_what_was_answered_before_the_engine_died_is_kept(files: Files):
    files.write(request("a"), *(request(f"r{i}", max_tokens=900) for i in range(3)))
    task = asyncio.ensure_future(files.run())
    while not files.target.exists() or not files.target.read_text():
        await asyncio.sleep(0.001)
    files.engine.die()
    with pytest.raises(ExceptionGroup) as caught:
        await task
    assert caught.group_contains(EngineDeadError)
    assert [answer["custom_id"] for answer in files.answers()] == ["a"]


async def test_files_that_cannot_be_opened(files: Files, tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be opened"):
        await files.run()
    files.write(request("a"))
    files.target = tmp_path / "no folder" / "out"
    with pytest.raises(ConfigError, match="cannot be opened"):
        await files.run()


async def test_an_empty_file(files: Files):
    files.write("", "  ")
    assert await files.run() == BatchCounts()
    assert files.target.read_text() == ""
