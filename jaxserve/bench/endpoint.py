"""One benchmark request to an OpenAI-compatible server: its body, and its stream as times and token counts.

The server's ``usage`` says how many tokens there were. Without one the tokenizer counts, and without that the chunks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from jaxserve.bench.http_client import HTTPClient, ServerUnreachableError
from jaxserve.errors import JaxserveError
from jaxserve.tokenizer.interface import Tokenizer

MAX_ERROR = 500
"""Characters of an error that are kept."""


@dataclass(frozen=True)
class BenchRequest:
    """One request of a workload.

    Args:
        prompt: text, or token ids (completions only).
        prompt_len: its tokens by the workload's count; None where nobody counted.
        output_len: ``max_tokens``.
        messages: a conversation to send instead of the prompt (chat only).
    """

    prompt: str | list[int]
    prompt_len: int | None
    output_len: int
    messages: list[dict[str, Any]] | None = None


@dataclass
class RequestResult:
    """What became of one request. Times are in seconds, ``start_time`` of ``time.perf_counter()``."""

    start_time: float = 0.0
    ttft: float = 0.0
    """From sending it to the first chunk that holds output."""
    latency: float = 0.0
    """From sending it to the last chunk that holds output."""
    itl: list[float] = field(default_factory=list[float])
    """Between such chunks."""
    prompt_len: int = 0
    output_tokens: int = 0
    counted_by: str = "chunks"
    """Who said how many output tokens there are: usage, tokenizer or chunks."""
    text: str = ""
    error: str = ""
    """Empty for a request that succeeded."""
    queue_time: float = 0.0
    """How long it waited here for its turn, with a limit on concurrency."""

    @property
    def success(self) -> bool:
        return not self.error


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None

    @property
    def text(self) -> str:
        return self.content or self.reasoning or self.reasoning_content or ""


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class StreamReader:
    """Reads server-sent events from pieces of a body."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """When chunks with output came."""
        self.texts: list[str] = []
        self.usage: _Usage | None = None
        self.error: str | None = None
        self.complete = False
        """Whether the stream's own end was seen."""
        self._rest = b""

    def feed(self, now: float, data: bytes) -> None:
        """Take a piece that arrived at ``now``."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            data = data.replace(b"\r\n", b"\n")
        *events, self._rest = data.split(b"\n\n")
        for event in events:
            self._take(now, event)

    def finish(self) -> None:
        """Take what no blank line ended."""
        if self._rest.strip():
            self._take(self.times[-1] if self.times else time.perf_counter(), self._rest)
            self._rest = b""

    def _take(self, now: float, event: bytes) -> None:
        lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
        data = b"\n".join(lines)
        if not data:
            return  # a comment
        if data == b"[DONE]":
            self.complete = True
            return
        try:
            chunk = _decode(data)
        except msgspec.MsgspecError as error:
            self.error = f"an event that is no chunk ({error}): {data[:200]!r}"
            return
        if chunk.error is not None:
            self.error = json.dumps(chunk.error)[:MAX_ERROR]
            return
        if chunk.usage is not None:
            self.usage = chunk.usage
        texts = [_text_of(choice) for choice in chunk.choices]
        found = [text for text in texts if text is not None]
        if found:
            self.times.append(now)
            self.texts += found


def _text_of(choice: _Choice) -> str | None:
    """A choice's text; None if it holds no output."""
    if choice.delta is not None:
        return choice.delta.text or ("" if choice.delta.tool_calls else None)
    return choice.text or None


@dataclass(frozen=True)
class Endpoint:
    """Where requests go, and what they all hold.

    Args:
        client: the connection.
        path: such as ``/v1/completions``.
        chat: whether it takes messages.
        model: the name that is asked for.
        extra_body: fields that every body gets; they win.
        ignore_eos: ask for output of full length. It is an extension of OpenAI's API: left out unless true.
        logprobs: log probabilities to ask for.
        request_id_prefix: begins the X-Request-Id of every request.
        tokenizer: counts output where the server does not.
    """

    client: HTTPClient
    path: str
    chat: bool
    model: str
    extra_body: Mapping[str, Any]
    ignore_eos: bool = False
    logprobs: int | None = None
    request_id_prefix: str = ""
    tokenizer: Tokenizer | None = None

    def body(self, request: BenchRequest) -> dict[str, Any]:
        """The request's JSON."""
        body: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.chat:
            body["messages"] = request.messages or [{"role": "user", "content": request.prompt}]
            body["max_completion_tokens"] = request.output_len
            if self.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": self.logprobs}
        else:
            body |= {"prompt": request.prompt, "max_tokens": request.output_len}
            if self.logprobs is not None:
                body["logprobs"] = self.logprobs
        if self.ignore_eos:
            body["ignore_eos"] = True
        return {**body, **self.extra_body}

    async def send(self, request: BenchRequest, number: int | str) -> RequestResult:
        """Send one request and read its stream. What goes wrong is in the result."""
        data = json.dumps(self.body(request)).encode()
        headers = {"x-request-id": f"{self.request_id_prefix}{number}"} if self.request_id_prefix else {}
        reader = StreamReader()
        result = RequestResult(start_time=time.perf_counter())
        try:
            response = await self.client.request(
                "POST", self.path, data, headers=headers, on_data=reader.feed
            )
        except ServerUnreachableError as error:
            result.error = str(error)
        else:
            if response.status == 200:
                reader.finish()
                if not (reader.complete or reader.error or response.has_length):
                    # Its end is the connection's: nothing else tells a whole answer from a broken one.
                    result.error = "The stream ended before [DONE]."
            else:
                body = response.body.decode(errors="replace").strip()[:MAX_ERROR]
                result.error = f"HTTP {response.status}: {body or 'no body'}"
        if not result.error and reader.error is not None:
            result.error = reader.error
        if not result.error and not reader.times:
            result.error = "The answer held no output."
        self._measure(request, reader, result)
        return result

    def _measure(self, request: BenchRequest, reader: StreamReader, result: RequestResult) -> None:
        times, usage = reader.times, reader.usage
        result.text = "".join(reader.texts)
        result.prompt_len = request.prompt_len or 0
        if usage is not None and usage.prompt_tokens is not None:
            result.prompt_len = usage.prompt_tokens
        if times:
            result.ttft = times[0] - result.start_time
            result.latency = times[-1] - result.start_time
            result.itl = [later - earlier for earlier, later in pairwise(times)]
        if usage is not None and usage.completion_tokens is not None:
            result.output_tokens, result.counted_by = usage.completion_tokens, "usage"
        elif self.tokenizer is not None:
            result.output_tokens = len(self.tokenizer.encode(result.text, add_special_tokens=False))
            result.counted_by = "tokenizer"
        else:
            result.output_tokens = len(times)


async def first_model(client: HTTPClient) -> tuple[str, str]:
    """The name of the first model that the server lists, and where it came from (its name, if that is not said).

    Raises:
        JaxserveError: it lists none.
    """
    response = await client.request("GET", "/v1/models")
    try:
        model = json.loads(response.body)["data"][0] if response.status == 200 else None
        if model is not None:
            return str(model["id"]), str(model.get("root") or model["id"])
    except (ValueError, LookupError, TypeError):
        pass
    raise JaxserveError(
        f"{client.base_url}/v1/models names no model (HTTP {response.status}: {response.body[:200]!r}). "
        "Name it with --model, or the server with --base-url."
    )
