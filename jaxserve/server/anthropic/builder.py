"""MessageBuilder: what the model says, piece by piece, becomes a message's blocks and its stream's events.

One block is open at a time; a piece of another kind closes it. A message that is not streamed is built the same
way and its events are dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from jaxserve.parsers import ContentDelta, OutputDelta, ReasoningDelta, ToolCallDelta, ToolCallStart
from jaxserve.server.anthropic.objects import (
    BlockDelta,
    BlockStart,
    BlockStop,
    Event,
    InputDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    Ping,
    SignatureDelta,
    StopDelta,
    StopReason,
    Text,
    TextDelta,
    Thinking,
    ThinkingDelta,
    ToolUse,
    Usage,
)


class MessageBuilder:
    """Builds ``message`` in place.

    Args:
        message: without content yet.
        show_thinking: False leaves thinking out.
    """

    def __init__(self, message: Message, *, show_thinking: bool = True) -> None:
        self.message = message
        self._show_thinking = show_thinking
        self._open: Text | Thinking | ToolUse | None = None
        self._parts: list[str] = []
        """Pieces of the open block: joined when it closes, once."""

    def start(self) -> list[Event]:
        """The message begins."""
        return [MessageStart(replace(self.message)), Ping()]

    def add(self, deltas: Iterable[OutputDelta]) -> list[Event]:
        """The answer goes on."""
        return [event for delta in deltas for event in self._add(delta)]

    def finish(self, stop_reason: StopReason, stop_sequence: str | None, usage: Usage) -> list[Event]:
        """The answer has ended."""
        events = self._close()
        self.message.stop_reason, self.message.stop_sequence = stop_reason, stop_sequence
        self.message.usage = usage
        return [*events, MessageDelta(StopDelta(stop_reason, stop_sequence), usage), MessageStop()]

    @property
    def _index(self) -> int:
        return len(self.message.content) - 1

    def _add(self, delta: OutputDelta) -> list[Event]:
        match delta:
            case ContentDelta(text):
                return [*self._open_as(Text), self._delta(text, TextDelta(text))]
            case ReasoningDelta(text):
                if not self._show_thinking:
                    return []
                return [*self._open_as(Thinking), self._delta(text, ThinkingDelta(text))]
            case ToolCallStart(_, call_id, name):
                return [*self._close(), self._begin(ToolUse(call_id, name, {}))]
            case ToolCallDelta(_, arguments):
                return [self._delta(arguments, InputDelta(arguments))]

    def _open_as(self, kind: type[Text] | type[Thinking]) -> list[Event]:
        """Make the open block one of ``kind``."""
        if isinstance(self._open, kind):
            return []
        return [*self._close(), self._begin(kind(""))]

    def _begin(self, block: Text | Thinking | ToolUse) -> Event:
        self._open, self._parts = block, []
        self.message.content = [*self.message.content, block]
        # Blocks are built in place; an event has its block as it was.
        return BlockStart(self._index, replace(block))

    def _delta(self, text: str, delta: TextDelta | ThinkingDelta | InputDelta) -> Event:
        self._parts.append(text)
        return BlockDelta(self._index, delta)

    def _close(self) -> list[Event]:
        block, self._open = self._open, None
        if block is None:
            return []
        whole = "".join(self._parts)
        events: list[Event] = []
        match block:
            case Text():
                block.text = whole
            case Thinking():
                block.thinking = whole
                events = [BlockDelta(self._index, SignatureDelta())]
            case ToolUse():
                block.input = _input(whole)
        return [*events, BlockStop(self._index)]


def _input(arguments: str) -> dict[str, Any]:
    """A call's input; one that was cut off by the limit of tokens has no form that a client could use."""
    try:
        value: Any = msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
