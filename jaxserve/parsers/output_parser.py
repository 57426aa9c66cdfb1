"""OutputParser: one choice's parser, made of a reasoning parser and a tool parser; and the whole output's parse.

White space beside tags belongs to the syntax: it is dropped around reasoning and beside calls. An output of
content alone keeps every character.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jaxserve.parsers.interface import (
    ContentDelta,
    OutputDelta,
    ReasoningDelta,
    StreamParser,
    ToolCallDelta,
    ToolCallStart,
)

MAX_PIECE = 2048
"""Characters that are parsed at once. How a text is cut changes nothing, and parsers take their buffers apart from the
front: a long one full of tags would be copied for each of them."""


class OutputParser:
    """Parses one choice, fed with its text as it comes.

    Args:
        reasoning: None leaves reasoning in the content.
        tools: None leaves calls in the content.
        parallel_tool_calls: False keeps the first call alone.
        end_token_ids: the tokens that end the reasoning, for ``num_reasoning_tokens``.
    """

    def __init__(
        self,
        reasoning: StreamParser | None = None,
        tools: StreamParser | None = None,
        *,
        parallel_tool_calls: bool = True,
        end_token_ids: Sequence[int] = (),
    ) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._parallel = parallel_tool_calls
        self._end_token_ids = list(end_token_ids)
        self._num_before_end = 0
        self._end_seen = False
        self._last_ids: list[int] = []
        self._trim = _Trim()
        self.num_calls = 0
        """Calls begun so far: the finish reason is ``tool_calls`` instead of ``stop`` if there are any."""

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[OutputDelta]:
        """The deltas that the next piece decides.

        Args:
            text: what is new of the choice's text.
            token_ids: the new tokens, for the count of reasoning tokens.
        """
        if self._reasoning is None and self._tools is None:
            return [ContentDelta(text)] if text else []
        if not self._end_seen:
            self._count(token_ids)
        deltas: list[OutputDelta] = []
        for start in range(0, len(text), MAX_PIECE):
            deltas += self._keep(self._parse(text[start : start + MAX_PIECE]))
        return deltas

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens before those that end the reasoning (all, as long as it goes on).

        0 without reasoning, and where the tokens that end it are not known.
        """
        if not self._trim.has_reasoned:
            return 0
        return self._num_before_end if self._end_seen or self._trim.in_reasoning else 0

    def _count(self, token_ids: Sequence[int]) -> None:
        end, ids = self._end_token_ids, [*self._last_ids, *token_ids]
        start = len(self._last_ids)
        for index in range(start, len(ids)):
            self._num_before_end += 1
            if end and ids[index] == end[-1] and ids[max(0, index + 1 - len(end)) : index + 1] == end:
                self._num_before_end -= len(end)
                self._end_seen = True
                return
        self._last_ids = ids[len(ids) - len(end) + 1 :] if len(end) > 1 else []

    def finish(self) -> list[OutputDelta]:
        """The rest, after the last piece. Call it once."""
        deltas: list[OutputDelta] = []
        if self._reasoning is not None:
            deltas = self._to_tools(self._reasoning.finish())
        if self._tools is not None:
            deltas += self._tools.finish()
        return self._keep(deltas) + self._trim.finish()

    def _parse(self, text: str) -> list[OutputDelta]:
        if self._reasoning is not None:
            return self._to_tools(self._reasoning.feed(text))
        assert self._tools is not None
        return self._tools.feed(text)

    def _to_tools(self, deltas: Iterable[OutputDelta]) -> list[OutputDelta]:
        if self._tools is None:
            return list(deltas)
        result: list[OutputDelta] = []
        for delta in deltas:
            result += self._tools.feed(delta.text) if isinstance(delta, ContentDelta) else [delta]
        return result

    def _keep(self, deltas: Iterable[OutputDelta]) -> list[OutputDelta]:
        result: list[OutputDelta] = []
        for delta in deltas:
            if isinstance(delta, ToolCallStart):
                if delta.index and not self._parallel:
                    continue
                self.num_calls = delta.index + 1
            elif isinstance(delta, ToolCallDelta) and delta.index >= self.num_calls:
                continue
            result += self._trim.feed(delta)
        return result


class _Trim:
    """Drops white space between parts of different kinds, and joins neighbours of one kind."""

    def __init__(self) -> None:
        self._held = ""
        """White space that waits for what follows it."""
        self._last: type[OutputDelta] | None = None
        self.has_reasoned = False
        self._strips = False
        """Whether white space at the front of what follows is dropped."""

    @property
    def in_reasoning(self) -> bool:
        return self._last is ReasoningDelta

    def feed(self, delta: OutputDelta) -> list[OutputDelta]:
        if not isinstance(delta, (ContentDelta, ReasoningDelta)):
            self._held, self._last, self._strips = "", type(delta), True
            return [delta]
        kind = type(delta)
        self.has_reasoned = self.has_reasoned or kind is ReasoningDelta
        if self._last is not kind:
            self._strips = self._last is not None or kind is ReasoningDelta
            self._held, self._last = "", kind
        text = self._held + delta.text
        if self._strips:
            text = text.lstrip()
            self._strips = not text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        return [kind(shown)] if shown else []

    def finish(self) -> list[OutputDelta]:
        held, self._held = self._held, ""
        return [ContentDelta(held)] if held and self._last is ContentDelta else []


# --- whole outputs -----------------------------------------------------------------------------------------


@dataclass(slots=True)
class ParsedCall:
    """A complete call; ``arguments`` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class ParsedOutput:
    """What the deltas of one choice add up to."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ParsedCall] = field(default_factory=list["ParsedCall"])

    def add(self, deltas: Iterable[OutputDelta]) -> None:
        """Append ``deltas``."""
        for delta in deltas:
            match delta:
                case ContentDelta(text):
                    self.content += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case ToolCallStart(_, call_id, name):
                    self.tool_calls.append(ParsedCall(call_id, name))
                case ToolCallDelta(index, arguments):
                    self.tool_calls[index].arguments += arguments


def parse_output(parser: OutputParser, text: str, token_ids: Sequence[int] = ()) -> ParsedOutput:
    """The parse of a whole output by a fresh ``parser``: the sum of its deltas."""
    output = ParsedOutput()
    output.add(parser.feed(text, token_ids))
    output.add(parser.finish())
    return output
