"""ResponseBuilder: what the model says, piece by piece, becomes a response's items and its stream's events.

One item is open at a time. A piece of another kind closes it (``….done`` from the inside out) and opens its own
(``….added`` from the outside in), so events are always properly nested. Every method returns the events that it
caused; a response that is not streamed is built the same way and its events are dropped.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Literal

from msgspec import UNSET
from msgspec.structs import replace

from jaxserve.server.openai.responses_api.objects import (
    ArgumentsDoneEvent,
    DeltaEvent,
    Event,
    FunctionCall,
    IncompleteDetails,
    ItemEvent,
    ItemStatus,
    OutputItem,
    OutputLogprob,
    OutputMessage,
    OutputText,
    PartEvent,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseUsage,
    TextDoneEvent,
)


class ResponseBuilder:
    """Builds ``response`` in place.

    Args:
        response: as it was admitted: queued or in progress, without output.
    """

    def __init__(self, response: Response) -> None:
        self.response = response
        self._parts: list[str] = []
        """Pieces of the open item's text or arguments: joined when it closes, once."""
        self._logprobs: list[OutputLogprob] = []
        self._open: OutputItem | None = None
        self._sequence_number = 0

    # --- the response -----------------------------------------------------------------------------------

    def start(self) -> list[Event]:
        """``created``, and ``queued`` for one that waits in the background."""
        events = [self._response_event("response.created")]
        if self.response.status == "queued":
            events.append(self._response_event("response.queued"))
        return events

    def in_progress(self) -> list[Event]:
        """The engine works on it."""
        self.response.status = "in_progress"
        return [self._response_event("response.in_progress")]

    def complete(self, usage: ResponseUsage) -> list[Event]:
        """The model came to its end."""
        events = self._close("completed")
        self.response.status = "completed"
        self.response.completed_at = int(time.time())
        self.response.usage = usage
        return [*events, self._response_event("response.completed")]

    def run_out_of_tokens(self, usage: ResponseUsage) -> list[Event]:
        """``max_output_tokens`` or the context's end came first."""
        events = self._close("incomplete")
        self.response.status = "incomplete"
        self.response.incomplete_details = IncompleteDetails("max_output_tokens")
        self.response.usage = usage
        return [*events, self._response_event("response.incomplete")]

    def fail(self, message: str, code: str = "server_error") -> list[Event]:
        """It can't go on; what there is stays."""
        events = self._close("incomplete")
        self.response.status = "failed"
        self.response.error = ResponseError(code, message)
        return [*events, self._response_event("response.failed")]

    def cancel(self) -> None:
        """The client does not want it any more; nothing follows."""
        self._close("incomplete")
        self.response.status = "cancelled"

    # --- pieces -----------------------------------------------------------------------------------------

    def text(self, delta: str, logprobs: Sequence[OutputLogprob] = ()) -> list[Event]:
        """The answer goes on."""
        events = self._open_as(OutputMessage)
        if not delta and not logprobs:
            return events
        self._parts.append(delta)
        self._logprobs += logprobs
        return [*events, self._delta("response.output_text.delta", delta, list(logprobs))]

    def reasoning(self, delta: str) -> list[Event]:
        """The reasoning goes on."""
        if not delta:
            return []
        events = self._open_as(ReasoningItem)
        self._parts.append(delta)
        return [*events, self._delta("response.reasoning_text.delta", delta)]

    def call(self, call_id: str, name: str) -> list[Event]:
        """A function call begins."""
        return [*self._close("completed"), *self._add(FunctionCall(_new_id("fc"), call_id, name))]

    def arguments(self, delta: str) -> list[Event]:
        """The open call's arguments go on."""
        assert isinstance(self._open, FunctionCall), "arguments follow their call"
        if not delta:
            return []
        self._parts.append(delta)
        event = DeltaEvent("response.function_call_arguments.delta", self._open.id, self._index, delta)
        return [self._numbered(event)]

    # --- items ------------------------------------------------------------------------------------------

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _open_as(self, kind: type[OutputMessage] | type[ReasoningItem]) -> list[Event]:
        """Make the open item one of ``kind``."""
        if isinstance(self._open, kind):
            return []
        events = self._close("completed")
        item = kind(_new_id("msg" if kind is OutputMessage else "rs"))
        part = OutputText("") if kind is OutputMessage else ReasoningText("")
        events += self._add(item)
        added = PartEvent("response.content_part.added", item.id, self._index, part)
        return [*events, self._numbered(added)]

    def _add(self, item: OutputItem) -> list[Event]:
        self._open = item
        self._parts = []
        self._logprobs = []
        self.response.output.append(item)
        # Items are built in place, events may be kept: each has the item as it was.
        return [self._numbered(ItemEvent("response.output_item.added", self._index, replace(item)))]

    def _close(self, status: ItemStatus) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        text = "".join(self._parts)
        item.status = status
        events: list[Event]
        match item:
            case FunctionCall():
                item.arguments = text
                events = [ArgumentsDoneEvent(item.id, self._index, item.name, text)]
            case OutputMessage():
                item.content = [OutputText(text, logprobs=self._logprobs)]
                done = TextDoneEvent("response.output_text.done", item.id, self._index, text)
                done.logprobs = self._logprobs
                events = [done, self._part_done(item.id, item.content[0])]
            case ReasoningItem():
                item.content = [ReasoningText(text)]
                done = TextDoneEvent("response.reasoning_text.done", item.id, self._index, text)
                events = [done, self._part_done(item.id, item.content[0])]
        events.append(ItemEvent("response.output_item.done", self._index, replace(item)))
        return [self._numbered(event) for event in events]

    def _part_done(self, item_id: str, part: OutputText | ReasoningText) -> PartEvent:
        return PartEvent("response.content_part.done", item_id, self._index, part)

    # --- events -----------------------------------------------------------------------------------------

    def _delta(self, type: str, delta: str, logprobs: list[OutputLogprob] | None = None) -> Event:
        assert self._open is not None
        event = DeltaEvent(type, self._open.id, self._index, delta, 0)
        event.logprobs = UNSET if logprobs is None else logprobs
        return self._numbered(event)

    def _response_event(
        self,
        type: Literal[
            "response.created",
            "response.queued",
            "response.in_progress",
            "response.completed",
            "response.incomplete",
            "response.failed",
        ],
    ) -> Event:
        response = replace(self.response, output=list(self.response.output))
        return self._numbered(ResponseEvent(type, response))

    def _numbered(self, event: Event) -> Event:
        event.sequence_number = self._sequence_number
        self._sequence_number += 1
        return event


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
