"""What reasoning syntaxes share: reasoning between two tags before the answer."""

from __future__ import annotations

from typing import ClassVar, Literal

from jaxserve.parsers.interface import ReasoningParser
from jaxserve.parsers.scan import first_tag, partial_tag


class TagReasoningParser(ReasoningParser):
    """Reasoning from ``start`` to ``end``; what follows is the answer.

    A template that opens the reasoning in the prompt, or closes it there because thinking is off, decides how
    the output begins; else the output's own first tag does.
    """

    other_starts: ClassVar[tuple[str, ...]] = ()
    other_ends: ClassVar[tuple[str, ...]] = ()
    assumed: ClassVar[Literal["reasoning", "content"]] = "content"
    """What an output without an opening tag is, where the prompt does not say."""

    def __init__(self, prompt: str = "") -> None:
        super().__init__(prompt)
        tail = prompt.rstrip()
        self._state = "start"
        self._assumed = self.assumed
        if self.start is not None and tail.endswith(self.start):
            self._assumed = "reasoning"
        elif tail.endswith(self.end):
            self._state = "content"

    @property
    def begins(self) -> Literal["reasoning", "answer", "either"]:
        if self._state == "content":
            return "answer"
        return "reasoning" if self._assumed == "reasoning" else "either"

    def _advance(self, *, final: bool) -> None:
        if self._state == "start":
            self._begin(final=final)
        if self._state == "reasoning":
            self._reason(final=final)
        if self._state == "content":
            self._content(self._buffer)
            self._buffer = ""

    def _begin(self, *, final: bool) -> None:
        text = self._buffer.lstrip()
        starts = tuple(tag for tag in (self.start, *self.other_starts) if tag is not None)
        opening = next((start for start in starts if text.startswith(start)), None)
        if opening is not None:
            self._buffer = text[len(opening) :]
            self._state = "reasoning"
        elif final or not any(start.startswith(text) for start in starts):
            self._state = self._assumed

    def _reason(self, *, final: bool) -> None:
        ends = (self.end, *self.other_ends)
        hit = first_tag(self._buffer, ends)
        if hit is not None:
            position, end = hit
            self._reasoning(self._buffer[:position])
            self._buffer = self._buffer[position + len(end) :]
            self._state = "content"
            return
        kept = 0 if final else partial_tag(self._buffer, ends)
        shown = len(self._buffer) - kept
        self._reasoning(self._buffer[:shown])
        self._buffer = self._buffer[shown:]
