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
        self._break = False
        """Whether a message has ended: a line break stands before what follows."""
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
                self._show(piece)
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
            self._show(text)
            self._keeps_tags = True

    def _read_call(self, call: JsonArguments, text: str) -> None:
        end = 0
        if not call.done:
            end = call.feed(text)
            self._raw = "" if call.started else self._raw + text[:end]
        if call.failed:
            self._show(self._raw + (call.pending if call.started else ""))
            self._call, self._raw, self._keeps_tags = None, "", True
        if call.failed or call.done:
            rest = text[end:]
            self._show(rest if call.failed else rest.strip())

    def _end(self, tag: str) -> None:
        call = self._call
        if call is None:
            self._show(tag if self._keeps_tags else "")
            self._break = self._break or not self._keeps_tags
        elif not call.started:
            self._show(self._raw + tag)
        elif not call.done and tag:
            self._show(call.pending + tag)  # the message ended, its arguments did not
        elif not call.done:
            self._arguments(call.pending)
        self._call, self._raw, self._keeps_tags = None, "", False

    def _show(self, text: str) -> None:
        if text and self._break:
            text = "\n" + text
            self._break = False
        self._content(text)
