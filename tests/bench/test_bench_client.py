"""The measuring client against servers that behave in every way there is: scripted, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from jaxserve.bench.endpoint import BenchRequest, Endpoint, StreamReader
from jaxserve.bench.http_client import HTTPClient, ServerUnreachableError
from jaxserve.errors import ConfigError

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def event(**fields: object) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


TEXT = event(choices=[{"index": 0, "text": "a"}])
USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 3})
DONE = b"data: [DONE]\n\n"


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0"
    )
    return head + await reader.readexactly(int(length.split(b":")[1]))


def run(answer: Answer, requests: int = 1, **options):
    """Results of ``requests`` requests, one after another, to a server that answers with ``answer``."""

    async def body():
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            client = HTTPClient(f"http://127.0.0.1:{port}", {"x-test": "1"})
            endpoint = Endpoint(client, "/v1/completions", False, "m", {}, request_id_prefix="r-", **options)
            results = [await endpoint.send(BenchRequest("hi", 1, 4), number) for number in range(requests)]
            client.close()
            return results

    return asyncio.run(asyncio.wait_for(body(), 30))


def test_a_stream_in_pieces_of_any_size():
    sent = []

    async def answer(reader, writer):
        sent.append(await read_request(reader))
        data = CHUNKED + b"".join(
            map(chunk, (TEXT[:9], TEXT[9:] + TEXT[:3], TEXT[3:] + b": comment\n\n", USAGE + DONE))
        )
        for position in range(0, len(data), 7):
            writer.write(data[position : position + 7])
            await writer.drain()
            await asyncio.sleep(0)
        writer.write(b"0\r\n\r\n")

    (result,) = run(answer)
    assert (result.error, result.text, result.output_tokens, result.prompt_len) == ("", "aa", 3, 7)
    assert (result.counted_by, len(result.itl)) == ("usage", 1)
    head, _, body = sent[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"x-test: 1" in head
    assert b"x-request-id: r-0" in head
    assert json.loads(body) == {
        "model": "m", "prompt": "hi", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_connections_are_kept_and_a_closed_one_is_replaced():
    connections = 0

    async def answer(reader, writer):
        nonlocal connections
        connections += 1
        for _ in range(2):  # then closed without a word
            await read_request(reader)
            writer.write(CHUNKED + chunk(TEXT + DONE) + b"0\r\n\r\n")
        await asyncio.sleep(0.05)
        writer.close()

    results = run(answer, 4)
    assert [result.error for result in results] == [""] * 4
    assert connections == 2
    assert {(r.counted_by, r.output_tokens) for r in results} == {("chunks", 1)}


def test_a_body_that_ends_with_its_connection():
    async def answer(reader, writer):
        await read_request(reader)
        writer.write(HEAD + b"connection: close\r\n\r\n" + TEXT.replace(b"\n", b"\r\n") + DONE)
        writer.close()

    assert [result.error for result in run(answer, 2)] == ["", ""]


@pytest.mark.parametrize(
    "data, words",
    [
        (CHUNKED + chunk(TEXT), "closed the connection within an answer"),
        (HEAD + b"connection: close\r\n\r\n" + TEXT, "before [DONE]"),
        (b"", "closed the connection without an answer"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nwait", "HTTP 503: wait"),
        (b"SSH-2.0-OpenSSH\r\n", "does not speak HTTP/1.1"),
        (CHUNKED + chunk(event(error={"message": "boom"}) + DONE) + b"0\r\n\r\n", "boom"),
        (CHUNKED + chunk(b"data: {nonsense\n\n") + b"0\r\n\r\n", "no chunk"),
        (CHUNKED + chunk(USAGE + DONE) + b"0\r\n\r\n", "held no output"),
    ],
)
def test_what_goes_wrong_is_in_the_result(data, words):
    async def answer(reader, writer):
        await read_request(reader)
        writer.write(data)
        await writer.drain()
        writer.close()

    (result,) = run(answer)
    assert words in result.error
    assert not result.success


def test_chunks_of_chat_reasoning_and_tools_are_output_and_role_alone_is_not():
    reader = StreamReader()
    deltas = [
        {"role": "assistant", "content": ""},
        {"reasoning": "hm"},
        {"tool_calls": [{"index": 0}]},
        {"content": "b"},
    ]
    for time, delta in enumerate(deltas):
        reader.feed(float(time), event(choices=[{"delta": delta}]))
    reader.feed(9.0, event(choices=[{"delta": {}, "finish_reason": "stop"}]))
    assert (reader.times, "".join(reader.texts)) == ([1.0, 2.0, 3.0], "hmb")


def test_nobody_listens():
    with pytest.raises(ServerUnreachableError, match="No server answers"):
        asyncio.run(HTTPClient("http://127.0.0.1:9", {}).request("GET", "/"))


def test_headers_cannot_hold_line_breaks():
    with pytest.raises(ConfigError, match="line break"):
        HTTPClient("http://localhost", {"x": "a\r\nb: c"})
