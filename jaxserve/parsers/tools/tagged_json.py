"""What the syntaxes share that write calls as JSON objects behind a tag: alone, or in a list."""

from __future__ import annotations

from typing import ClassVar

from jaxserve.parsers.interface import ToolParser
from jaxserve.parsers.scan import JsonCall, first_tag, partial_tag


class TaggedJsonParser(ToolParser):
    """Calls between an opening tag and a closing one that may be missing.

    In a list (``[{…}, {…}]``) or alone, with white space, commas or semicolons between them. What breaks off
    is content, from the opening tag on if no call of it was started yet.
    """

    opening: ClassVar[tuple[str, ...]]
    closing: ClassVar[tuple[str, ...]] = ()
    lists: ClassVar[bool] = False
    """Whether the calls of a tag stand in a list."""

    _call: JsonCall | None = None
    _inside = False
    _raw = ""
    """What was read since the opening tag, until a call has started: content if it turns out to be none."""
    _in_list = False
    _num_read = 0
    """Calls read behind this opening tag."""

    def _advance(self, *, final: bool) -> None:
        while self._buffer:
            before = (len(self._buffer), self._inside, self._call is None)
            if self._call is not None:
                self._read_call(self._call)
            elif self._inside:
                self._between(final=final)
            else:
                self._outside(final=final)
            if before == (len(self._buffer), self._inside, self._call is None):
                break
        if final and self._inside:
            self._leave(keep=self._call is not None or not self._num_read)

    def _outside(self, *, final: bool) -> None:
        """Content up to the next opening tag."""
        hit = first_tag(self._buffer, self.opening)
        if hit is None:
            kept = 0 if final else partial_tag(self._buffer, self.opening)
            shown = len(self._buffer) - kept
            self._content(self._buffer[:shown])
            self._buffer = self._buffer[shown:]
            return
        position, tag = hit
        self._content(self._buffer[:position])
        self._raw = tag
        self._buffer = self._buffer[position + len(tag) :]
        self._inside, self._in_list, self._num_read = True, False, 0

    def _between(self, *, final: bool) -> None:
        """Behind an opening tag, before or after a call."""
        text = self._buffer.lstrip()
        self._raw += self._buffer[: len(self._buffer) - len(text)]
        self._buffer = text
        if not text:
            return
        closing = next((tag for tag in self.closing if text.startswith(tag)), None)
        if closing is not None and self._num_read and not self._in_list:
            self._buffer = text[len(closing) :]
            self._leave(keep=False)
        elif partial_tag(text, self.closing) == len(text):
            if final and self._num_read:
                self._buffer = ""  # the output was cut within the closing tag
            elif final:
                self._leave(keep=True)
        elif text[0] == "[" and self.lists and not self._in_list and not self._num_read:
            self._take_char()
            self._in_list = True
        elif text[0] == "]" and self._in_list:
            self._take_char()
            self._in_list = False
            if not self.closing:
                self._leave(keep=not self._num_read)
        elif text[0] == "," and self._in_list and self._num_read:
            self._take_char()
        elif text[0] == "{" and (self._in_list or not self.lists or not self._num_read):
            self._call = JsonCall(self.tools, self._start, self._arguments)
        elif text[0] == "}" and self._num_read and not self._in_list:
            self._take_char()  # models close one brace too many
        else:
            self._leave(keep=not self._num_read)

    def _read_call(self, call: JsonCall) -> None:
        end = call.feed(self._buffer)
        if call.started:
            self._raw = ""
        else:
            self._raw += self._buffer[:end]
        self._buffer = self._buffer[end:]
        if call.done:
            self._call, self._num_read, self._raw = None, self._num_read + 1, ""
        elif call.failed:
            self._leave(keep=True)

    def _take_char(self) -> None:
        self._raw += self._buffer[0]
        self._buffer = self._buffer[1:]

    def _leave(self, *, keep: bool) -> None:
        """Go on outside; ``keep`` shows what was read of a call that did not start."""
        if keep:
            self._content(self._raw)
        self._raw, self._inside, self._call = "", False, None
