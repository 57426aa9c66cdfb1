"""The contract of parsers: deltas, and the two kinds of parser that make them.

A parser decides by what it has read, never by how the text was cut: the deltas of any two ways to split an
output add up to the same. What it cannot decide yet it holds back; ``finish`` gives the rest. It never raises
and loses no text: a call that breaks its syntax is content.

A call's ``ToolCallStart`` comes once, before its arguments, when its name is known to be one of the tools and
its arguments begin as they should. If they break off later (the output was cut, or the model erred) the call
stays unfinished: its arguments are not valid JSON then, as OpenAI warns, and the rest of the text is content.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from jaxserve.parsers.scan import first_tag, partial_tag

Schemas = Mapping[str, Mapping[str, Any]]
"""The tools of a request: name to the JSON schema of its parameters."""


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call begins. ``index`` counts the calls of one output from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of a call's arguments, a fragment of a JSON object's text."""

    index: int
    arguments: str


OutputDelta = ContentDelta | ReasoningDelta | ToolCallStart | ToolCallDelta


def new_call_id() -> str:
    """A call's id in OpenAI's form."""
    return f"call_{secrets.token_hex(12)}"


class StreamParser(ABC):
    """Reads an output piece by piece. Subclasses consume ``_buffer`` in ``_advance`` and emit deltas.

    ``_advance`` takes from the buffer's front what is decided and leaves the rest there.
    """

    special_tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens that the syntax is made of: they must stay in the text even with
    ``skip_special_tokens``. Names that the tokenizer does not have as special tokens are ignored."""
    stop_tokens: ClassVar[tuple[str, ...]] = ()
    """Special tokens that end the output beside the model's own."""

    def __init__(self) -> None:
        self._buffer = ""
        self._deltas: list[OutputDelta] = []

    def feed(self, text: str) -> list[OutputDelta]:
        """The deltas that ``text`` decides."""
        if not text:
            return []
        self._buffer += text
        self._advance(final=False)
        return self._take()

    def finish(self) -> list[OutputDelta]:
        """The output has ended: everything that was held back."""
        self._advance(final=True)
        self._content(self._buffer)
        self._buffer = ""
        return self._take()

    @abstractmethod
    def _advance(self, *, final: bool) -> None:
        """Consume what can be decided; with ``final`` nothing more will come."""

    def _content(self, text: str) -> None:
        if text:
            self._deltas.append(ContentDelta(text))

    def _take_tag(self, tags: Sequence[str], *, final: bool) -> str | None:
        """The first of ``tags``, taken out of the buffer with the content before it.

        None where none stands there: then all that cannot begin one is content.
        """
        hit = first_tag(self._buffer, tags)
        if hit is None:
            kept = 0 if final else partial_tag(self._buffer, tags)
            end = taken = len(self._buffer) - kept
        else:
            end, taken = hit[0], hit[0] + len(hit[1])
        self._content(self._buffer[:end])
        self._buffer = self._buffer[taken:]
        return None if hit is None else hit[1]

    def _reasoning(self, text: str) -> None:
        if text:
            self._deltas.append(ReasoningDelta(text))

    def _take(self) -> list[OutputDelta]:
        deltas, self._deltas = self._deltas, []
        return deltas


@dataclass(frozen=True, slots=True)
class CallTag:
    """How a call of one function is written: ``begin``, its arguments as JSON, ``end``.

    ``trigger``, the front of ``begin``, comes in no text but a call.
    """

    trigger: str
    begin: str
    end: str


class ToolParser(StreamParser):
    """Finds calls in the answer; the rest is content.

    Args:
        tools: the request's tools; a call of any other name is content.
        make_id: makes the calls' ids.
    """

    def __init__(self, tools: Schemas, make_id: Callable[[], str] | None = None) -> None:
        super().__init__()
        self.tools = tools
        self._make_id = make_id or self.default_id
        self._num_calls = 0

    @staticmethod
    def default_id() -> str:
        """An id as the syntax's templates want it."""
        return new_call_id()

    @classmethod
    def call_tag(cls, name: str) -> CallTag | None:
        """How a grammar can make a call of ``name`` keep to a schema; None where the syntax has no such form."""
        return None

    def _start(self, name: str) -> None:
        self._deltas.append(ToolCallStart(self._num_calls, self._make_id(), name))
        self._num_calls += 1

    def _arguments(self, text: str) -> None:
        """More arguments of the call that was started last."""
        if text:
            self._deltas.append(ToolCallDelta(self._num_calls - 1, text))


class ReasoningParser(StreamParser):
    """Separates reasoning from the answer.

    Args:
        prompt: the rendered prompt: templates may begin (or rule out) the reasoning themselves.
    """

    start: ClassVar[str | None]
    """What begins the reasoning."""
    end: ClassVar[str]
    """What ends it: the answer follows."""
    budgets: ClassVar[bool] = True
    """Whether writing ``end`` after any token ends the reasoning: then it can be limited."""
    tokens: ClassVar[bool] = False
    """Whether ``end`` always has the same tokens, though it is several."""

    def __init__(self, prompt: str = "") -> None:
        super().__init__()
        self.prompt = prompt

    @property
    @abstractmethod
    def begins(self) -> Literal["reasoning", "answer", "either"]:
        """What the output begins with, as far as the prompt says; ``either`` where its first token does."""
