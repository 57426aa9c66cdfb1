"""Parsed outputs as chat messages, whole or as a stream's deltas."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from jaxserve.outputs import CompletionOutput
from jaxserve.parsers import (
    ContentDelta,
    OutputDelta,
    OutputParser,
    ParsedOutput,
    ReasoningDelta,
    ToolCallDelta,
    ToolCallStart,
)
from jaxserve.server.openai.responses import (
    AssistantMessage,
    Delta,
    FunctionCall,
    FunctionDelta,
    ToolCall,
    ToolCallChunk,
)

NOTHING = Delta(content="")
"""The delta of a piece that decides nothing."""


def message_of(parsed: ParsedOutput, echo: str, *, include_reasoning: bool) -> AssistantMessage:
    """The message of a whole output, after ``echo``. Without a text beside calls or reasoning its content is null."""
    content = echo + parsed.content
    message = AssistantMessage(content)
    if parsed.reasoning and include_reasoning:
        message.reasoning = parsed.reasoning
    if parsed.tool_calls:
        message.tool_calls = [
            ToolCall(call.id, FunctionCall(call.name, call.arguments)) for call in parsed.tool_calls
        ]
    if not content and (parsed.tool_calls or parsed.reasoning):
        message.content = None
    return message


def delta_of(deltas: Sequence[OutputDelta], *, include_reasoning: bool) -> Delta:
    """The deltas of one piece as one, the parts of each call joined."""
    if not deltas:
        return NOTHING
    if len(deltas) == 1 and isinstance(deltas[0], ContentDelta):  # nearly every token
        return Delta(content=deltas[0].text)
    content, reasoning = "", ""
    calls: list[ToolCallChunk] = []
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                content += text
            case ReasoningDelta(text):
                reasoning += text
            case ToolCallStart(index, call_id, name):
                calls.append(ToolCallChunk(index, FunctionDelta(name, ""), call_id, "function"))
            case ToolCallDelta(index, arguments):
                if not calls or calls[-1].index != index:
                    calls.append(ToolCallChunk(index, FunctionDelta(arguments="")))
                function = calls[-1].function
                function.arguments = (function.arguments or "") + arguments
    if not include_reasoning:
        reasoning = ""
    return Delta(
        content=content if content or not (reasoning or calls) else UNSET,
        reasoning=reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def finish_reason(choice: CompletionOutput, parser: OutputParser) -> str | None:
    """``tool_calls`` for an answer that stopped after calls."""
    return "tool_calls" if choice.finish_reason == "stop" and parser.num_calls else choice.finish_reason
