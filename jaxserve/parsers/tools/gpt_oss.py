"""gpt-oss's tool calls: messages to functions (Harmony). What is no call is content, without its tags."""

from __future__ import annotations

from collections.abc import Callable

from jaxserve.parsers.call_readers import JsonArguments
from jaxserve.parsers.harmony import SPECIAL_TOKENS, MessageReader, read_header
from jaxserve.parsers.interface import Schemas, ToolParser

_PREFIX = "functions."


class HarmonyParser(ToolParser):
    """The recipient ``functions.name`` makes a message a call."""

    special_tokens = SPECIAL_TOKENS
    stop_tokens = ("<|call|>", "<|return|>")

    def __init__(self, tools: Schemas, make_id: Callable[[], str] | None = None) -> None:
        super().__init__(tools, make_id)
        self._reader = MessageReader()
        self._call: JsonArguments | None = None
        self._raw = ""
        """What was read of a call that has not started: content if it turns out to be none."""
        self._keeps_tags = False
        """Whether the message is shown as it is: a call of something that is not offered, or a broken one."""

    def _advance(self, *, final: bool) -> None:
        text, self._buffer = self._buffer, ""
        for kind, piece in self._reader.feed(text, final=final):
            if kind == "header":
                self._begin(piece)
            elif kind == "body" and self._call is not None:
                self._read_call(self._call, piece)
            elif kind == "end":
                self._end(piece)
            else:
                self._content(piece)
        if final:
            self._end("")

    def _begin(self, text: str) -> None:
        recipient = read_header(text).recipient
        self._call, self._raw, self._keeps_tags = None, "", False
        if recipient is None:
            return
        name = recipient.removeprefix(_PREFIX)
        if recipient.startswith(_PREFIX) and name in self.tools:
            self._call = JsonArguments(lambda: self._start(name), self._arguments)
            self._raw = text
        else:
            self._content(text)
            self._keeps_tags = True

    def _read_call(self, call: JsonArguments, text: str) -> None:
        end = 0
        if not call.done:
            end = call.feed(text)
            self._raw = "" if call.started else self._raw + text[:end]
        if call.failed:
            self._content(self._raw + (call.pending if call.started else ""))
            self._call, self._raw, self._keeps_tags = None, "", True
        if call.failed or call.done:
            rest = text[end:]
            self._content(rest if call.failed else rest.strip())

    def _end(self, tag: str) -> None:
        if self._call is None:
            self._content(tag if self._keeps_tags else "\n")
        elif self._call.started:
            self._arguments("" if self._call.done else self._call.pending)
        else:
            self._content(self._raw + tag)
        self._call, self._raw, self._keeps_tags = None, "", False
