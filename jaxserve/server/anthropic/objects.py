"""What /v1/messages answers with: the message, its content blocks, and the events of its stream.

A field that is UNSET is left out; None is sent as null, where Anthropic sends null.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Text(Struct, tag="text"):
    text: str


class Thinking(Struct, tag="thinking"):
    """What the model thought. There is nothing to sign here: it may come back as it is."""

    thinking: str
    signature: str = ""


class ToolUse(Struct, tag="tool_use"):
    """A call of one of the request's tools."""

    id: str
    name: str
    input: dict[str, Any]


ContentBlock = Text | Thinking | ToolUse


class Usage(Struct):
    """Tokens of one message; those that came from the cache are counted apart."""

    input_tokens: int
    output_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0

    @classmethod
    def of(cls, prompt_tokens: int, cached_tokens: int, output_tokens: int) -> Usage:
        return cls(prompt_tokens - cached_tokens, output_tokens, 0, cached_tokens)


class Message(Struct):
    """An answer."""

    id: str
    model: str
    content: list[ContentBlock]
    usage: Usage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"


class TokenCount(Struct):
    input_tokens: int


# --- events ------------------------------------------------------------------------------------------------


class MessageStart(Struct, tag="message_start"):
    message: Message


class Ping(Struct, tag="ping"):
    pass


class BlockStart(Struct, tag="content_block_start"):
    index: int
    content_block: ContentBlock


class TextDelta(Struct, tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag="signature_delta"):
    signature: str = ""


class InputDelta(Struct, tag="input_json_delta"):
    partial_json: str


class BlockDelta(Struct, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Struct, tag="content_block_stop"):
    index: int


class StopDelta(Struct):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct, tag="message_delta"):
    """The end: why, and what it took."""

    delta: StopDelta
    usage: Usage


class MessageStop(Struct, tag="message_stop"):
    pass


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
