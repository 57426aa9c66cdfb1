"""gpt-oss's reasoning: messages on the analysis channel (Harmony). Calls go on as they are, to the tool parser."""

from __future__ import annotations

from typing import Literal

from jaxserve.parsers.harmony import SPECIAL_TOKENS, START, Header, MessageReader, read_header
from jaxserve.parsers.interface import ReasoningParser


class HarmonyReasoningParser(ReasoningParser):
    """Analysis is reasoning; the final channel, and commentary to nobody, are content."""

    special_tokens = SPECIAL_TOKENS
    stop_tokens = ("<|call|>", "<|return|>")
    start, end = None, "<|channel|>final<|message|>"
    budgets = False  # between the channels there may be calls, which are no reasoning
    tokens = True

    def __init__(self, prompt: str = "") -> None:
        super().__init__(prompt)
        self._reader = MessageReader()
        self._header: Header | None = None
        self._break = ""
        """A line break if a message has ended: it stands before what follows."""

    @property
    def begins(self) -> Literal["reasoning", "answer", "either"]:
        return "reasoning"

    def _advance(self, *, final: bool) -> None:
        text, self._buffer = self._buffer, ""
        for kind, piece in self._reader.feed(text, final=final):
            if kind == "header":
                self._begin(piece)
            elif kind == "body" and self._header is not None and self._header.channel == "analysis":
                self._reasoning(self._break + piece)
                self._break = ""
            elif kind == "end":
                self._end(piece)
            else:
                self._content(self._break + piece)
                self._break = ""

    def _begin(self, text: str) -> None:
        header = read_header(text)
        if header.recipient is not None and header.channel != "analysis":
            self._content(self._break + (text if text.startswith(START) else f"{START}assistant{text}"))
            self._break = ""
        self._header = header

    def _end(self, tag: str) -> None:
        header, self._header = self._header, None
        if header is None:
            return
        if header.recipient is not None and header.channel != "analysis":
            self._content(tag)
        else:
            self._break = "\n"
