"""One response at work: from the admitted request, through its items and events, to the store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from jaxserve.errors import JaxserveError
from jaxserve.outputs import CompletionOutput
from jaxserve.parsers import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
)
from jaxserve.server.conversation import Reply
from jaxserve.server.errors import error_info
from jaxserve.server.openai.logprobs import chat_logprobs
from jaxserve.server.openai.responses_api.builder import ResponseBuilder
from jaxserve.server.openai.responses_api.input_items import chat_messages
from jaxserve.server.openai.responses_api.objects import (
    Event,
    OutputLogprob,
    OutputMessage,
    Response,
    ResponseUsage,
)
from jaxserve.server.openai.responses_api.store import ResponseStore, StoredResponse

logger = logging.getLogger(__name__)


class ResponseRun:
    """Reads ``reply`` to its end and keeps the response.

    Args:
        response: as it was admitted.
        reply: what the model says.
        store: where it is kept when it has ended; None keeps it nowhere.
        messages: the conversation before it, without instructions.
        input_items: the request's own input.
        num_logprobs: most likely tokens to list for every token; None lists none.
        include_reasoning: False drops the reasoning.
    """

    def __init__(
        self,
        response: Response,
        reply: Reply,
        store: ResponseStore | None,
        messages: Sequence[dict[str, Any]],
        input_items: list[dict[str, Any]],
        num_logprobs: int | None,
        *,
        include_reasoning: bool = True,
    ) -> None:
        self.response = response
        self._reply = reply
        self._store = store
        self._messages = messages
        self._num_logprobs = num_logprobs
        self._include_reasoning = include_reasoning
        self._logprobs: list[OutputLogprob] = []
        """Of tokens that came since the last piece of text: as in chat, those of reasoning and calls are among them."""
        self._builder = ResponseBuilder(response)
        self._task: asyncio.Task[None] | None = None
        self.entry = StoredResponse(response, [*messages], input_items, _size(messages, input_items))

    async def aclose(self) -> None:
        """Leave; what has not finished is aborted."""
        await self._reply.aclose()

    # --- in the foreground ------------------------------------------------------------------------------

    async def finish(self) -> Response:
        """The complete response.

        Raises:
            JaxserveError: the engine failed.
        """
        async for _ in self._read():
            pass
        return self.response

    async def events(self) -> AsyncIterator[bytes]:
        """The stream: a failure is its last event."""
        yield _encode(self._builder.start() + self._builder.in_progress())
        async for events in self._read_or_fail():
            yield _encode(events)

    # --- in the background ------------------------------------------------------------------------------

    def start(self, *, log: bool) -> None:
        """Go on in a task of its own, in the store from now on.

        Args:
            log: keep the events, for those who read them later.
        """
        assert self._store is not None, "a background response is stored"
        if log:
            self.entry.start_log()
        self._keep(self._builder.start())
        self._store.put(self.entry)
        self._task = asyncio.create_task(self._run())
        self.entry.cancel = self._cancel

    async def _run(self) -> None:
        try:
            self._keep(self._builder.in_progress())
            async for events in self._read_or_fail():
                self._keep(events)
        finally:
            await self._settle()

    async def _cancel(self) -> None:
        """End the task, and wait for that."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._settle()  # once more: a task that had not begun has done nothing

    async def _settle(self) -> None:
        """Leave nothing running, however the task ended."""
        self.entry.cancel = None
        if self.entry.running:
            self._builder.cancel()
            self._save()
        if self.entry.log is not None:
            self.entry.log.close()
        await self.aclose()

    def _keep(self, events: list[Event]) -> None:
        if self.entry.log is not None:
            self.entry.log.append([_encode([event]) for event in events])

    # --- reading ----------------------------------------------------------------------------------------

    async def _read_or_fail(self) -> AsyncIterator[list[Event]]:
        try:
            async for events in self._read():
                yield events
        except Exception as error:
            if not isinstance(error, JaxserveError):
                logger.exception("A response failed.")
            events = self._builder.fail(error_info(error).message)
            self._save()
            yield events

    async def _read(self) -> AsyncIterator[list[Event]]:
        async with contextlib.aclosing(self._reply.read()) as outputs:
            async for choice, deltas in outputs:
                self._logprobs += self._logprobs_of(choice)
                events = [event for delta in deltas for event in self._events(delta)]
                if events:
                    yield events
        events = self._end()
        self._save()
        yield events

    def _events(self, delta: OutputDelta) -> list[Event]:
        if isinstance(delta, ContentDelta):
            logprobs, self._logprobs = self._logprobs, []
            return self._builder.text(delta.text, logprobs)
        match delta:
            case ReasoningDelta(text):
                return self._builder.reasoning(text) if self._include_reasoning else []
            case ToolCallStart(_, call_id, name):
                return self._builder.call(call_id, name)
            case ToolCallDelta(_, arguments):
                return self._builder.arguments(arguments)

    def _end(self) -> list[Event]:
        reply = self._reply
        usage = ResponseUsage.of(
            reply.num_prompt_tokens, reply.num_cached_tokens, reply.num_tokens, reply.num_reasoning_tokens
        )
        events: list[Event] = []
        if not self.response.output:
            events = self._builder.text("")  # an answer without a word is still a message
        if self._logprobs and isinstance(self.response.output[-1], OutputMessage):
            events += self._builder.text("", self._logprobs)
        if reply.finish_reason == "length":
            return events + self._builder.run_out_of_tokens(usage)
        return events + self._builder.complete(usage)

    def _logprobs_of(self, choice: CompletionOutput) -> list[OutputLogprob]:
        if self._num_logprobs is None or not choice.logprobs:
            return []
        content = chat_logprobs(choice.token_ids, choice.logprobs, self._num_logprobs, as_ids=False).content
        return [
            OutputLogprob(token.token, token.logprob, token.bytes, token.top_logprobs) for token in content
        ]

    def _save(self) -> None:
        if self._store is None or self.entry.deleted:
            return
        items = msgspec.to_builtins(self.response.output)
        output = chat_messages([item for item in items if _can_go_on(item)])
        self.entry.messages = [*self._messages, *output]
        self.entry.num_bytes += _size(items)
        self._store.put(self.entry)


def _can_go_on(item: dict[str, Any]) -> bool:
    """Whether an item can stand in a prompt: not one that never began, or a call whose arguments broke off."""
    if item["type"] != "function_call":
        return item["content"] != []
    try:
        msgspec.json.decode(item["arguments"] or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True


def _encode(events: Sequence[Event]) -> bytes:
    return b"".join(
        b"event: " + event.type.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
        for event in events
    )


def _size(*values: Any) -> int:
    return sum(len(msgspec.json.encode(value)) for value in values)
