"""Parts on their own: bodies, error texts, log probabilities, disconnects."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import msgspec
import pytest
from starlette.exceptions import HTTPException

from jaxserve.errors import (
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    QueueFullError,
    RequestFailedError,
    UnsupportedError,
)
from jaxserve.outputs import Logprob
from jaxserve.server.errors import HTTPProblem, error_info, error_response, without_internals
from jaxserve.server.json_body import MAX_DEPTH, decode_json
from jaxserve.server.openai.logprobs import (
    LOWEST,
    CompletionLogprobsBuilder,
    chat_logprobs,
    most_likely,
    prompt_logprobs,
)
from jaxserve.server.streaming import ClientDisconnected, EventStream, run_while_connected

# --- bodies -----------------------------------------------------------------------------------------------


def nested(depth: int, text: str) -> bytes:
    """A list that is ``depth`` levels deep."""
    return (text * depth + "1" + ("]" if text == "[" else "}") * depth).encode()


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_depth(opening):
    assert decode_json(nested(MAX_DEPTH, opening)) == json.loads(nested(MAX_DEPTH, opening))
    for depth in (MAX_DEPTH + 1, 200, 5000):
        with pytest.raises(InvalidRequestError, match="nested deeper"):
            decode_json(nested(depth, opening))


def test_brackets_in_texts_do_not_count():
    assert decode_json(json.dumps(["[" * 1000]).encode()) == ["[" * 1000]


def test_broad_is_not_deep():
    value = [[{"a": [1]}] for _ in range(1000)]
    assert decode_json(json.dumps(value).encode()) == value


# --- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error, status, kind, param",
    [
        (InvalidRequestError("m", param="p"), 400, "BadRequestError", "p"),
        (UnsupportedError("m", param="p"), 400, "BadRequestError", "p"),
        (ModelNotFoundError("m"), 404, "NotFoundError", "model"),
        (QueueFullError("m"), 503, "Service Unavailable", None),
        (EngineDeadError("m"), 503, "Service Unavailable", None),
        (RequestFailedError("m"), 500, "InternalServerError", None),
        (HTTPProblem(413, "m"), 413, "Request Entity Too Large", None),
        (HTTPException(405, "m"), 405, "Method Not Allowed", None),
    ],
)
def test_status_and_type(error, status, kind, param):
    info = error_info(error)
    assert (info.code, info.param, info.message) == (status, param, "m")
    assert info.type == kind or status == 413  # its phrase differs between versions of Python
    response = error_response(error)
    assert response.status_code == status
    assert msgspec.json.decode(response.body)["error"]["code"] == status


def test_what_nobody_foresaw_is_not_described():
    info = error_info(RuntimeError("details"))
    assert info.code == 500
    assert "details" not in info.message


@pytest.mark.parametrize(
    "message, shown",
    [
        ("Out of memory: 5 GiB needed, 3/4 used", "Out of memory: 5 GiB needed, 3/4 used"),
        ("cannot read /home/me/model/x.gguf now", "cannot read … now"),
        ("cannot read ~/secret/model.gguf", "cannot read …"),
        ("object at 0x7f00deadbeef failed", "object at … failed"),
        ('File "/usr/lib/x.py", line 5, in f', "…"),
        ("it failed\nTraceback (most recent call last):\n  File ...", "it failed"),
        ("see https://example.com/a/b", "see https://example.com/a/b"),
        ("", "The server failed to answer this request."),
    ],
)
def test_internals_are_left_out(message, shown):
    assert without_internals(message) == shown


def test_long_messages_are_cut():
    assert len(error_info(InvalidRequestError("x" * 100_000)).message) < 5000


# --- log probabilities ------------------------------------------------------------------------------------

POSITION = {
    7: Logprob(-3.0, 9, "seven"),
    1: Logprob(-0.5, 1, "one"),
    2: Logprob(-1.0, 2, "two"),
    3: Logprob(-1.5, 3, "three"),
}


@pytest.mark.parametrize("top, ids", [(0, []), (1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (-1, [1, 2, 3, 7])])
def test_the_most_likely_tokens_by_rank(top, ids):
    assert [token for token, _ in most_likely(POSITION, top)] == ids


def test_a_sampled_token_among_the_most_likely_is_listed_once():
    position = {2: POSITION[2], 1: POSITION[1]}
    entry = chat_logprobs([2], [position], 2, as_ids=False).content[0]
    assert [top.token for top in entry.top_logprobs] == ["one", "two"]
    built = CompletionLogprobsBuilder(2, as_ids=False, decode=str).build([2], [position])
    assert built.top_logprobs == [{"one": -0.5, "two": -1.0}]


def test_infinities_become_numbers():
    position = {0: Logprob(-math.inf, 5, "x"), 1: Logprob(math.nan, 1, "y")}
    chat = chat_logprobs([0], [position], -1, as_ids=False)
    completion = CompletionLogprobsBuilder(-1, as_ids=False, decode=str).build([0], [position])
    prompt = prompt_logprobs([None, position])
    for form in (chat, completion, prompt):
        text = msgspec.json.encode(form).decode()
        assert str(LOWEST) in text
        assert "Infinity" not in text
        assert "NaN" not in text


def test_tokens_without_text():
    position = {5: Logprob(-0.5, 1, None)}
    entry = chat_logprobs([5], [position], 1, as_ids=False).content[0]
    assert (entry.token, entry.bytes) == ("token_id:5", None)


def test_tokens_spelt_alike_keep_the_most_likely():
    position = {9: Logprob(-2.0, 3, "�"), 8: Logprob(-0.5, 1, "�"), 7: Logprob(-1.0, 2, "x")}
    built = CompletionLogprobsBuilder(2, as_ids=False, decode=str).build([9], [position])
    assert built.top_logprobs == [{"�": -0.5, "x": -1.0}]
    assert built.token_logprobs == [-2.0]


# --- disconnects ------------------------------------------------------------------------------------------


def receiving(*types: str, then_wait: bool = True) -> Any:
    """An ASGI receive that gives messages of these types, then none."""
    waiting = list(types)

    async def receive() -> dict[str, str]:
        if not waiting and then_wait:
            await asyncio.Event().wait()
        await asyncio.sleep(0)
        return {"type": waiting.pop(0)}

    return receive


@pytest.mark.anyio
async def test_work_that_finishes():
    async def work() -> int:
        await asyncio.sleep(0.001)
        return 5

    assert await run_while_connected(receiving(), work()) == 5


@pytest.mark.anyio
async def test_work_that_fails():
    async def work() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await run_while_connected(receiving(), work())


@pytest.mark.anyio
async def test_work_is_cancelled_when_the_client_leaves():
    ended = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(ClientDisconnected):
        await run_while_connected(receiving("http.request", "http.disconnect"), work())
    assert ended.is_set()


@pytest.mark.anyio
async def test_a_stream_cleans_up_when_its_task_is_cancelled():
    cleaned: list[bool] = []
    sent: list[Any] = []

    async def events() -> Any:
        yield b"data: 1\n\n"
        await asyncio.Event().wait()

    async def cleanup() -> None:
        cleaned.append(True)

    async def send(message: Any) -> None:
        sent.append(message)

    task = asyncio.create_task(EventStream(events(), cleanup)({"type": "http"}, receiving(), send))
    while len(sent) < 2:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cleaned == [True]


@pytest.mark.anyio
async def test_an_unforeseen_error_in_a_stream_is_told_and_logged(caplog):
    sent: list[Any] = []

    async def events() -> Any:
        yield b"data: 1\n\n"
        raise RuntimeError("details")

    async def cleanup() -> None:
        pass

    async def send(message: Any) -> None:
        sent.append(message)

    await EventStream(events(), cleanup)({"type": "http"}, receiving(), send)
    last = sent[-1]
    assert last["more_body"] is False
    error, done = last["body"].decode().strip().split("\n\n")
    assert done == "data: [DONE]"
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == 500
    assert "details" not in error
    assert "A stream failed" in caplog.text
