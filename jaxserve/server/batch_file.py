"""OpenAI batch files: a request a line in, an answer a line out, through the application itself.

Answers are appended as they come, so a run that is cut short loses little: the next one with the same output file
skips what has an answer. In the end the file is put into the order of the input.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import uuid
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import httpx
from fastapi import FastAPI

from jaxserve.errors import ConfigError, EngineDeadError
from jaxserve.server.generation import GenerationService

logger = logging.getLogger(__name__)

URLS = ("/v1/chat/completions", "/v1/completions")
"""Endpoints that a line may name."""
FIELDS = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True)
class BatchLine:
    """One line of the input: a request, or what is wrong with it (``problem``)."""

    number: int
    custom_id: str | None
    url: str = ""
    body: dict[str, Any] | None = None
    problem: str | None = None


@dataclass
class BatchCounts:
    """What came of a file's lines."""

    completed: int = 0
    failed: int = 0
    skipped: int = 0
    """Answered by an earlier run."""


async def run_batch_file(
    app: FastAPI,
    source: Path,
    target: Path,
    *,
    max_concurrency: int = 256,
    on_line: Callable[[], object] = lambda: None,
) -> BatchCounts:
    """Answer every line of ``source`` into ``target``.

    Args:
        app: the application over a running engine.
        source: JSON lines ``{"custom_id", "method": "POST", "url", "body"}``.
        target: the output; answers that it holds already are kept.
        max_concurrency: lines worked on at once.
        on_line: called after each line.

    Raises:
        ConfigError: a file cannot be read or written.
        EngineDeadError: the engine died; what was answered is in ``target``.
    """
    service: GenerationService = app.state.service
    counts = BatchCounts()
    with _opened(source, "rb") as lines, _opened(target, "ab+") as output:
        answers = _Answers(output)
        limit = asyncio.Semaphore(max_concurrency)
        async with _client(app) as client, asyncio.TaskGroup() as group:

            async def work(line: BatchLine) -> None:
                try:
                    record = await _answer(client, line)
                    if service.engine.errored is not None:
                        raise EngineDeadError(f"The engine has stopped: {service.engine.errored}")
                    answers.append(line, record)
                    counts.completed += _succeeded(record)
                    counts.failed += not _succeeded(record)
                    on_line()
                finally:
                    limit.release()

            for line in _read(lines):
                if line.problem is None and answers.holds(line):
                    counts.skipped += 1
                    on_line()
                    continue
                await limit.acquire()
                group.create_task(work(line))
        answers.put_in_order(target)
    return counts


def _read(lines: BinaryIO) -> Iterator[BatchLine]:
    seen: set[str] = set()
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        line = parse_line(number, text)
        if line.problem is None and line.custom_id in seen:
            line = BatchLine(number, line.custom_id, problem=f"custom_id {line.custom_id!r} is used before.")
        if line.custom_id is not None:
            seen.add(line.custom_id)
        yield line


def parse_line(number: int, text: bytes) -> BatchLine:
    """The request of a line, or its problem."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return BatchLine(number, None, problem=f"Line {number} is not JSON: {error}")
    if not isinstance(value, dict):
        return BatchLine(number, None, problem=f"Line {number} is no object.")
    fields = cast("dict[str, Any]", value)
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        return BatchLine(number, None, problem=f"Line {number} has no custom_id.")
    return BatchLine(number, custom_id, fields.get("url", ""), fields.get("body"), _problem(fields))


def _problem(fields: dict[str, Any]) -> str | None:
    unknown = sorted(set(fields) - FIELDS)
    if unknown:
        return f"Unknown field {unknown[0][:100]!r}."
    if fields.get("method", "POST") != "POST":
        return f"method must be POST, got {fields['method']!r:.100}."
    if fields.get("url") not in URLS:
        return f"url must be one of {', '.join(URLS)}, got {fields.get('url')!r:.100}."
    body = fields.get("body")
    if not isinstance(body, dict):
        return "body must be an object."
    if cast("dict[str, Any]", body).get("stream"):
        return "stream is not available in a batch."
    return None


@contextlib.asynccontextmanager
async def _client(app: FastAPI) -> AsyncGenerator[httpx.AsyncClient, None]:
    """Reaches the application without a socket."""
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://batch", timeout=None) as client:
        yield client


async def _answer(client: httpx.AsyncClient, line: BatchLine) -> dict[str, Any]:
    """The line's record in OpenAI's form: a refused request has a response, a wrong line has an error."""
    record: dict[str, Any] = {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": None,
        "error": None,
    }
    if line.problem is not None:
        record["error"] = {"code": "invalid_line", "message": line.problem}
        return record
    response = await client.post(line.url, json=line.body)
    record["response"] = {
        "status_code": response.status_code,
        "request_id": response.headers.get("x-request-id"),
        "body": response.json(),
    }
    return record


def _succeeded(record: dict[str, Any]) -> bool:
    return record["response"] is not None and record["response"]["status_code"] == 200


class _Answers:
    """The output file: which lines it has answers for, and where they begin."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._places: dict[str, tuple[int, int]] = {}
        """Of each custom id's answer: where it begins, and the input's line (0: not seen in this run)."""
        self._others: list[tuple[int, int]] = []
        """Answers without a custom id of their own, likewise."""
        self._load()

    def _load(self) -> None:
        """Find the answers of earlier runs. What is no whole line was cut off by their end, and goes."""
        self._file.seek(0)
        end = 0
        for text in self._file:
            record = _record(text)
            if record is None:
                break
            response = record.get("response")
            # What the server could not answer is asked again.
            if isinstance(record.get("custom_id"), str) and response and response["status_code"] < 500:
                self._places[record["custom_id"]] = (end, 0)
            end += len(text)
        self._file.truncate(end)

    def holds(self, line: BatchLine) -> bool:
        """Whether an earlier run has answered it; notes its place in the order."""
        place = self._places.get(line.custom_id or "")
        if place is None:
            return False
        self._places[line.custom_id or ""] = (place[0], line.number)
        return True

    def append(self, line: BatchLine, record: dict[str, Any]) -> None:
        begin = self._file.seek(0, os.SEEK_END)
        self._file.write(json.dumps(record, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._file.flush()
        if line.problem is None and line.custom_id is not None:
            self._places[line.custom_id] = (begin, line.number)
        else:
            self._others.append((begin, line.number))

    def put_in_order(self, target: Path) -> None:
        """Rewrite the file in the order of the input; answers to lines that it no longer has are left out."""
        places = sorted([*self._places.values(), *self._others], key=lambda place: place[1])
        temporary = target.with_name(target.name + ".part")
        with open(temporary, "wb") as ordered:
            for begin, number in places:
                if number:
                    self._file.seek(begin)
                    ordered.write(self._file.readline())
        os.replace(temporary, target)


def _record(text: bytes) -> dict[str, Any] | None:
    if not text.endswith(b"\n"):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return cast("dict[str, Any]", value) if isinstance(value, dict) else None


def _opened(path: Path, mode: str) -> BinaryIO:
    try:
        return cast(BinaryIO, open(path, mode))
    except OSError as error:
        raise ConfigError(f"{path} cannot be opened: {error.strerror}.") from None
